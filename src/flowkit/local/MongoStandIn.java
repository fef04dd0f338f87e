import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.h2.H2Backend;
import java.util.List;

/** A server that speaks MongoDB's protocol and keeps its data in one file: {@code MongoStandIn HOST PORT FILE}. */
public final class MongoStandIn {
    /** The server announces an older wire version than current drivers accept, while it knows the commands they send. */
    private record Announced(List<Integer> getVersionArray, int getWireVersion) implements MongoVersion {}

    public static void main(String[] args) {
        H2Backend backend = new H2Backend(args[2]);
        backend.version(new Announced(List.of(5, 0, 0), 13));
        MongoServer server = new MongoServer(backend);
        Runtime.getRuntime().addShutdownHook(new Thread(server::shutdownNow));
        server.bind(args[0], Integer.parseInt(args[1]));
    }
}

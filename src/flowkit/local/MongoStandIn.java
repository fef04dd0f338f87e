import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.AbstractMongoBackend;
import de.bwaldvogel.mongo.backend.h2.H2Backend;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import java.util.List;

/**
 * A server that speaks MongoDB's protocol: {@code MongoStandIn HOST PORT [FILE]}. Without a file its data end with it.
 */
public final class MongoStandIn {
    /** The server announces an older wire version than current drivers accept, while it knows the commands they send. */
    private record Announced(List<Integer> getVersionArray, int getWireVersion) implements MongoVersion {}

    public static void main(String[] args) {
        AbstractMongoBackend backend = args.length > 2 ? new H2Backend(args[2]) : new MemoryBackend();
        backend.version(new Announced(List.of(5, 0, 0), 13));
        MongoServer server = new MongoServer(backend);
        Runtime.getRuntime().addShutdownHook(new Thread(server::shutdownNow));
        server.bind(args[0], Integer.parseInt(args[1]));
    }
}

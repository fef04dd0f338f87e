import de.bwaldvogel.mongo.MongoCollection;
import de.bwaldvogel.mongo.MongoDatabase;
import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.AbstractMongoBackend;
import de.bwaldvogel.mongo.backend.CursorRegistry;
import de.bwaldvogel.mongo.backend.Index;
import de.bwaldvogel.mongo.backend.IndexKey;
import de.bwaldvogel.mongo.backend.KeyValue;
import de.bwaldvogel.mongo.backend.Missing;
import de.bwaldvogel.mongo.backend.ValueComparator;
import de.bwaldvogel.mongo.backend.h2.H2Backend;
import de.bwaldvogel.mongo.backend.h2.H2Database;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import de.bwaldvogel.mongo.backend.memory.MemoryDatabase;
import de.bwaldvogel.mongo.bson.Document;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.Comparator;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import org.h2.mvstore.MVStore;

/**
 * A server that speaks MongoDB's protocol: {@code MongoStandIn HOST PORT [FILE]}. Without a file its data end with it.
 *
 * <p>The library uses an index only for a query that names exactly its keys, if it is unique. Here, further conditions
 * do not prevent that, and other indexes serve equal values of their first keys, as in MongoDB. Otherwise each update
 * with a fence would read the whole collection.
 */
public final class MongoStandIn {
    /** The server announces an older wire version than current drivers accept, while it knows the commands they send. */
    private record Announced(List<Integer> getVersionArray, int getWireVersion) implements MongoVersion {}

    public static void main(String[] args) {
        AbstractMongoBackend backend = args.length > 2 ? new Kept(args[2]) : new Passing();
        backend.version(new Announced(List.of(5, 0, 0), 13));
        MongoServer server = new MongoServer(backend);
        Runtime.getRuntime().addShutdownHook(new Thread(server::shutdownNow));
        server.bind(args[0], Integer.parseInt(args[1]));
    }

    private static final class Passing extends MemoryBackend {
        @Override
        public MemoryDatabase openOrCreateDatabase(String name) {
            return new PassingDatabase(name, getCursorRegistry());
        }
    }

    private static final class PassingDatabase extends MemoryDatabase {
        private Indexes<Integer> indexes;

        private Indexes<Integer> indexes() {
            indexes = indexes == null ? new Indexes<>() : indexes;
            return indexes;
        }

        PassingDatabase(String name, CursorRegistry cursors) {
            super(name, cursors);
        }

        @Override
        protected Index<Integer> openOrCreateUniqueIndex(
                String collection, String name, List<IndexKey> keys, boolean sparse) {
            Index<Integer> index = super.openOrCreateUniqueIndex(collection, name, keys, sparse);
            return indexes().unique(collection, name, keys, sparse, index);
        }

        @Override
        protected Index<Integer> openOrCreateSecondaryIndex(
                String collection, String name, List<IndexKey> keys, boolean sparse) {
            return indexes().ordered(collection, name, keys, sparse);
        }
    }

    private static final class Kept extends H2Backend {
        Kept(String file) {
            super(file);
        }

        @Override
        protected MongoDatabase openOrCreateDatabase(String name) {
            return new KeptDatabase(name, getMvStore(), getCursorRegistry());
        }
    }

    private static final class KeptDatabase extends H2Database {
        private Indexes<Object> indexes;

        /** Return the indexes. The constructor of the library opens those of the file before this class has its fields. */
        private Indexes<Object> indexes() {
            indexes = indexes == null ? new Indexes<>() : indexes;
            return indexes;
        }

        KeptDatabase(String name, MVStore store, CursorRegistry cursors) {
            super(name, store, cursors);
        }

        @Override
        protected Index<Object> openOrCreateUniqueIndex(
                String collection, String name, List<IndexKey> keys, boolean sparse) {
            Index<Object> index = super.openOrCreateUniqueIndex(collection, name, keys, sparse);
            return indexes().unique(collection, name, keys, sparse, index);
        }

        @Override
        protected Index<Object> openOrCreateSecondaryIndex(
                String collection, String name, List<IndexKey> keys, boolean sparse) {
            return indexes().ordered(collection, name, keys, sparse);
        }
    }

    /** The indexes of one database, of which the library uses the first that can serve a query. */
    private static final class Indexes<P> {
        private final Map<String, List<UniqueIndex<P>>> unique = new ConcurrentHashMap<>();
        private final Map<String, List<OrderedIndex<P>>> ordered = new ConcurrentHashMap<>();

        private static <V> List<V> of(Map<String, List<V>> indexes, String collection) {
            return indexes.computeIfAbsent(collection, key -> new CopyOnWriteArrayList<>());
        }

        Index<P> unique(String collection, String name, List<IndexKey> keys, boolean sparse, Index<P> index) {
            List<UniqueIndex<P>> others = of(unique, collection);
            UniqueIndex<P> made = new UniqueIndex<>(name, keys, sparse, index, others);
            others.add(made);
            return made;
        }

        Index<P> ordered(String collection, String name, List<IndexKey> keys, boolean sparse) {
            List<OrderedIndex<P>> others = of(ordered, collection);
            OrderedIndex<P> index = new OrderedIndex<>(name, keys, sparse, of(unique, collection), others);
            others.add(index);
            return index;
        }
    }

    /** A unique index of the library that also serves queries with further conditions. */
    private static final class UniqueIndex<P> extends Index<P> {
        private final Index<P> index;
        private final List<UniqueIndex<P>> unique;

        UniqueIndex(
                String name, List<IndexKey> keys, boolean sparse, Index<P> index, List<UniqueIndex<P>> unique) {
            super(name, keys, sparse);
            this.index = index;
            this.unique = unique;
        }

        /** Return the conditions on the keys of the index, or all if it does not have each of them. */
        private Document own(Document query) {
            if (query.size() == keys().size() || !query.keySet().containsAll(keys())) {
                return query;
            }
            Document own = new Document();
            keys().forEach(key -> own.put(key, query.get(key)));
            return own;
        }

        @Override
        public boolean canHandle(Document query) {
            return index.canHandle(own(query));
        }

        @Override
        public Iterable<P> getPositions(Document query) {
            return index.getPositions(own(query));
        }

        @Override
        public P getPosition(Document document) {
            return index.getPosition(document);
        }

        @Override
        public void checkAdd(Document document, MongoCollection<P> collection) {
            index.checkAdd(document, collection);
        }

        @Override
        public void add(Document document, P position, MongoCollection<P> collection) {
            index.add(document, position, collection);
        }

        @Override
        public P remove(Document document) {
            return index.remove(document);
        }

        @Override
        public void checkUpdate(Document old, Document changed, MongoCollection<P> collection) {
            index.checkUpdate(old, changed, collection);
        }

        @Override
        public void updateInPlace(Document old, Document changed, P position, MongoCollection<P> collection) {
            index.updateInPlace(old, changed, position, collection);
        }

        @Override
        public long getCount() {
            return index.getCount();
        }

        @Override
        public boolean isEmpty() {
            return index.isEmpty();
        }

        @Override
        public long getDataSize() {
            return index.getDataSize();
        }

        @Override
        public boolean isUnique() {
            return true;
        }

        @Override
        public boolean hasSameOptions(Index<?> other) {
            return other.isUnique() && super.hasSameOptions(other);
        }

        @Override
        public void drop() {
            index.drop();
            unique.remove(this);
        }
    }

    /** An index that need not be unique, in memory. It serves queries that name equal values of its first keys. */
    private static final class OrderedIndex<P> extends Index<P> {
        private static final Comparator<Object> VALUES =
                Comparator.nullsFirst(ValueComparator.ascWithoutListHandling());
        private static final Object LAST = new Object();

        /** The position of each document, by the values of the keys and the id. */
        private final TreeMap<List<Object>, P> positions = new TreeMap<>(OrderedIndex::compare);

        private final List<UniqueIndex<P>> unique;
        private final List<OrderedIndex<P>> ordered;

        OrderedIndex(
                String name,
                List<IndexKey> keys,
                boolean sparse,
                List<UniqueIndex<P>> unique,
                List<OrderedIndex<P>> ordered) {
            super(name, keys, sparse);
            this.unique = unique;
            this.ordered = ordered;
        }

        private static int compare(List<Object> left, List<Object> right) {
            int common = Math.min(left.size(), right.size());
            for (int i = 0; i < common; i++) {
                boolean last = left.get(i) == LAST;
                if (last || right.get(i) == LAST) {
                    return last ? 1 : -1;
                }
                int order = VALUES.compare(left.get(i), right.get(i));
                if (order != 0) {
                    return order;
                }
            }
            return Integer.compare(left.size(), right.size());
        }

        private List<List<Object>> entries(Document document) {
            List<Object> plain = new ArrayList<>();
            for (String key : keys()) {
                Object value = key.indexOf('.') < 0 ? document.get(key) : LAST;
                if (!isPlain(value)) {
                    return entriesOfLists(document);
                }
                plain.add(value);
            }
            return withId(document, plain);
        }

        private List<List<Object>> withId(Document document, List<Object> entry) {
            if (isSparse() && entry.stream().allMatch(Objects::isNull)) {
                return List.of();
            }
            entry.add(document.get("_id"));
            return List.of(entry);
        }

        /** Return the entries of a document in which a key may have several values. */
        private List<List<Object>> entriesOfLists(Document document) {
            List<List<Object>> found = new ArrayList<>();
            for (KeyValue values : getKeyValues(document)) {
                List<Object> entry = new ArrayList<>();
                values.forEach(value -> entry.add(Missing.isNullOrMissing(value) ? null : value));
                found.addAll(withId(document, entry));
            }
            return found.isEmpty() ? withId(document, new ArrayList<>(Collections.nCopies(keys().size(), null))) : found;
        }

        private static boolean isPlain(Object value) {
            return value == null
                    || value instanceof String
                    || value instanceof Number
                    || value instanceof Boolean
                    || value instanceof Instant;
        }

        /** Return the values that a condition permits, or null if they are not a list of plain values. */
        private static Collection<?> permitted(Object condition) {
            if (condition instanceof Document in && in.keySet().equals(Set.of("$in"))) {
                return in.get("$in") instanceof Collection<?> values && values.stream().allMatch(OrderedIndex::isPlain)
                        ? values
                        : null;
            }
            return isPlain(condition) ? Collections.singletonList(condition) : null;
        }

        /** Return the combinations of first values that a query permits; those without any values if it permits all. */
        private List<List<Object>> prefixes(Document query) {
            List<List<Object>> prefixes = List.of(List.of());
            for (String key : keys()) {
                Collection<?> values = query.containsKey(key) ? permitted(query.get(key)) : null;
                if (values == null) {
                    break;
                }
                List<List<Object>> longer = new ArrayList<>();
                for (List<Object> prefix : prefixes) {
                    for (Object value : values) {
                        List<Object> next = new ArrayList<>(prefix);
                        next.add(value);
                        longer.add(next);
                    }
                }
                prefixes = longer;
            }
            return prefixes;
        }

        /** Return whether a condition only names the highest value, as for what is due. */
        private static boolean isUpperBound(Document condition) {
            Object bound = upperBound(condition);
            return condition.size() == 1 && bound != null && isPlain(bound);
        }

        private static Object upperBound(Document condition) {
            return condition.getOrDefault("$lte", condition.get("$lt"));
        }

        private static List<Object> longer(List<Object> prefix, Object... more) {
            List<Object> longer = new ArrayList<>(prefix);
            Collections.addAll(longer, more);
            return longer;
        }

        /** Return how many of its first keys a query names, or 0 if the index does not have what the query finds. */
        private int served(Document query) {
            List<List<Object>> prefixes = prefixes(query);
            boolean absent = isSparse() && prefixes.stream().anyMatch(prefix -> prefix.stream().anyMatch(Objects::isNull));
            return absent || prefixes.isEmpty() ? 0 : prefixes.get(0).size();
        }

        @Override
        public boolean isUnique() {
            return false;
        }

        @Override
        public boolean hasSameOptions(Index<?> other) {
            return !other.isUnique() && super.hasSameOptions(other);
        }

        @Override
        public synchronized boolean canHandle(Document query) {
            int served = served(query);
            return served > 0
                    && unique.stream().noneMatch(index -> index.canHandle(query))
                    && ordered.stream().allMatch(index -> index.served(query) <= served);
        }

        @Override
        public synchronized Iterable<P> getPositions(Document query) {
            Set<P> found = new LinkedHashSet<>();
            for (List<Object> prefix : prefixes(query)) {
                Object next = prefix.size() < keys().size() ? query.get(keys().get(prefix.size())) : null;
                boolean bounded = next instanceof Document range && isUpperBound(range);
                List<Object> start = bounded ? longer(prefix, null, LAST) : prefix;
                List<Object> end = bounded ? longer(prefix, upperBound((Document) next), LAST) : longer(prefix, LAST);
                found.addAll(positions.subMap(start, true, end, false).values());
            }
            return found;
        }

        @Override
        public P getPosition(Document document) {
            return null;
        }

        @Override
        public void checkAdd(Document document, MongoCollection<P> collection) {}

        @Override
        public synchronized void add(Document document, P position, MongoCollection<P> collection) {
            entries(document).forEach(entry -> positions.put(entry, position));
        }

        @Override
        public synchronized P remove(Document document) {
            P removed = null;
            for (List<Object> entry : entries(document)) {
                P position = positions.remove(entry);
                removed = position == null ? removed : position;
            }
            return removed;
        }

        @Override
        public void checkUpdate(Document old, Document changed, MongoCollection<P> collection) {}

        @Override
        public synchronized void updateInPlace(
                Document old, Document changed, P position, MongoCollection<P> collection) {
            if (!nullAwareEqualsKeys(old, changed)) {
                remove(old);
                add(changed, position, collection);
            }
        }

        @Override
        public synchronized long getCount() {
            return positions.size();
        }

        @Override
        public synchronized boolean isEmpty() {
            return positions.isEmpty();
        }

        @Override
        public long getDataSize() {
            return 0;
        }

        @Override
        public synchronized void drop() {
            positions.clear();
            ordered.remove(this);
        }
    }
}

"""Installing the programs of local servers: downloads, builds and the cache that keeps them."""

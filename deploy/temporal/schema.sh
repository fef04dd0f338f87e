#!/bin/sh
# Create Temporal's two databases, or bring them to the version of this image. May run again at any time.
# The connection stands in SQL_PLUGIN, SQL_HOST, SQL_PORT, SQL_USER and SQL_PASSWORD.
set -eu

for store in temporal visibility; do
    database=temporal
    [ "$store" = temporal ] || database=temporal_visibility
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0
    temporal-sql-tool --db "$database" update-schema -d "/etc/temporal/schema/postgresql/v12/$store/versioned"
done

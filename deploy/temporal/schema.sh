#!/bin/sh
# Creates Temporal's two databases, or upgrades them to the version of this image. Safe to run again.
# Reads the connection from SQL_PLUGIN, SQL_HOST, SQL_PORT, SQL_USER and SQL_PASSWORD.
set -eu

for store in temporal visibility; do
    database=temporal
    [ "$store" = temporal ] || database=temporal_visibility
    temporal-sql-tool --db "$database" create
    temporal-sql-tool --db "$database" setup-schema -v 0.0
    temporal-sql-tool --db "$database" update-schema -d "/etc/temporal/schema/postgresql/v12/$store/versioned"
done

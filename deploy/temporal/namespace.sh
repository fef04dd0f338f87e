#!/bin/sh
# Creates the namespace and FlowKit's search attributes. Safe to run again.
# Reads TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and RETENTION, the retention of the namespace.
set -eu

until temporal operator cluster health; do
    sleep 1
done

temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1 ||
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"

# The namespace takes a few seconds to reach all parts of the server.
until temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" \
    --name FlowkitPipeline --type Keyword --name FlowkitStatus --type Keyword --name FlowkitWaitsFor --type Keyword; do
    sleep 1
done

#!/bin/sh
# Create the namespace and FlowKit's search attributes. May run again at any time.
# The server stands in TEMPORAL_ADDRESS, the namespace in TEMPORAL_NAMESPACE, its retention in RETENTION.
set -eu

until temporal operator cluster health; do
    sleep 1
done

temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" >/dev/null 2>&1 ||
    temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$RETENTION"

# The namespace is known everywhere after a few seconds.
until temporal operator search-attribute create --namespace "$TEMPORAL_NAMESPACE" \
    --name FlowkitPipeline --type Keyword --name FlowkitStatus --type Keyword; do
    sleep 1
done

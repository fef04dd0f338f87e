#!/bin/sh
# Start the task of bare_temporal.py with Temporal's command line. `flowkit up bare_temporal:Words` runs it.
set -eu

id=proverbs-$(date +%s)-$$

temporal workflow start --type Task --task-queue "${FLOWKIT_QUEUE:-flowkit}" --workflow-id "$id" --input '{
  "params": {"pipeline_name": "proverbs"},
  "graph": {"nodes": [
    {"node_id": "words", "type": "words", "io": {"input_inline": {"texts": [
      "Many hands make light work.", "A stitch in time saves nine.", "Still waters run deep."]}}},
    {"node_id": "sum", "type": "coordinator_fn", "depends_on": ["words"],
     "io": {"fn": "metrics.aggregate", "fn_args": {"node_id": "words"}}}]}}'

temporal workflow result --workflow-id "$id"
temporal workflow query --workflow-id "$id" --type status

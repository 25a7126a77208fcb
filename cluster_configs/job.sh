#!/usr/bin/env bash
# Submit a run to the cluster at RAY_ADDRESS (the dashboard's, e.g. http://HEAD:8265) and follow it.
# Usage: job.sh CONFIG.yaml [key.path=value ...]   -- with absolute paths inside the configuration.
set -euo pipefail
config=$(realpath "$1")
shift
exec ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" -- silverspoon-ray train "$config" "$@"

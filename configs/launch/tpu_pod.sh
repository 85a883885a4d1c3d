#!/usr/bin/env bash
# A TPU slice of several machines, from nothing to a run: creates it, installs the project, starts training on all.
#   PROJECT=my-project ZONE=europe-west4-b TYPE=v5litepod-16 configs/launch/tpu_pod.sh NAME BUCKET \
#     --config alfworld_qwen2.5_1.5b --mesh fsdp=16 data=/hgpo/alfworld run_dir=/hgpo/runs/NAME cache_dir=/hgpo/cache
# From the project's folder. The bucket is mounted as /hgpo on every machine; it holds ALFWorld's data and gets the run.
# Called again, it installs the folder as it is now and continues from the last checkpoint, unless the run has ended; with
# COMMAND=evaluate it evaluates instead. Delete the slice when it is done:
#   gcloud compute tpus tpu-vm delete NAME --project=my-project --zone=europe-west4-b
set -euo pipefail
: "${PROJECT:?give the cloud project}" "${ZONE:?give the zone}" "${TYPE:?give the slice, as in v5litepod-16 or v6e-16}"
case $TYPE in
  v5litepod-*) software=v2-alpha-tpuv5-lite ;;
  v5p-*) software=v2-alpha-tpuv5 ;;
  v6e-*) software=v2-alpha-tpuv6e ;;
  *) echo "TYPE=$TYPE: expected v5litepod-N, v5p-N or v6e-N" >&2; exit 2 ;;
esac
if [ $# -lt 2 ]; then
  echo "give a name for the slice, a bucket, and what train takes" >&2
  exit 2
fi
name=$1 bucket=$2 command=${COMMAND:-train}
shift 2
[ "$command" != train ] || set -- --resume auto "$@"
where=(--project="$PROJECT" --zone="$ZONE")
everywhere() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$1"; }

if ! gcloud compute tpus tpu-vm describe "$name" "${where[@]}" >/dev/null 2>&1; then
  gcloud compute tpus tpu-vm create "$name" "${where[@]}" --accelerator-type="$TYPE" --version="$software"
fi
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
tar --exclude=runs --exclude=.git -czf "$archive" .
gcloud compute tpus tpu-vm scp "$archive" "$name":hgpo_jax.tar.gz "${where[@]}" --worker=all
everywhere "set -eu
mkdir -p hgpo_jax && tar -xzf hgpo_jax.tar.gz -C hgpo_jax
[ -d venv ] || python3 -m venv venv
venv/bin/pip install --quiet --constraint hgpo_jax/.ci/constraints.txt './hgpo_jax[tpu]'
sudo mkdir -p /hgpo && sudo chown \"\$USER\" /hgpo
mountpoint -q /hgpo || gcsfuse --implicit-dirs $(printf %q "$bucket") /hgpo"
# On a TPU jax finds out from the machine which process this is.
everywhere "cd hgpo_jax && exec ../venv/bin/python -m hgpo_jax.$command --distributed $(printf '%q ' "$@")"

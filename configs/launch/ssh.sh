#!/usr/bin/env bash
# Several machines as one program, without a scheduler: one process on each, started over ssh. The paper's 7B setting:
#   HOSTS="gpu1 gpu2" configs/launch/ssh.sh --config alfworld_qwen2.5_7b --mesh data=2,fsdp=8 data=$ALFWORLD_DATA \
#     run_dir=RUNS/NAME cache_dir=CACHE
# From the project's folder, with its virtual environment active; all machines see both, run_dir and cache_dir under these
# paths. Called again, it continues from the last checkpoint, and does nothing if the run has ended. With COMMAND=evaluate it
# evaluates instead. When one process fails, this ends the connections to the others. They get the variables named in $PASS,
# which others may see in a list of processes; secrets belong in files such as ~/.netrc. PORT is the first machine's (12345).
set -euo pipefail
read -ra hosts <<<"${HOSTS:?give the machines; the first one coordinates}"
command=${COMMAND:-train}
[ "$command" != train ] || set -- --resume auto "$@"
program=$(printf '%q ' "$(command -v python)" -m hgpo_jax."$command" --distributed "$@")

pass=
for name in ${PASS:-XLA_FLAGS LD_LIBRARY_PATH HF_HOME HF_HUB_OFFLINE WANDB_PROJECT WANDB_MODE}; do
  [ -z "${!name-}" ] || pass+=" $(printf '%q' "$name=${!name}")"
done

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for i in "${!hosts[@]}"; do
  process="JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-12345} JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i"
  # shellcheck disable=SC2029  # what is expanded here is quoted for the shell there
  ssh "${hosts[i]}" "cd $(printf %q "$PWD") && exec env $process$pass $program" &
done
for _ in "${hosts[@]}"; do
  wait -n
done

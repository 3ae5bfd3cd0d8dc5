#!/bin/bash
# Runs a script for Slurm in a job of moorage: sets the variables that it reads, and is its `srun`, which starts one
# process for each task. `moorage sbatch` brings this file.

refuse() {
    echo "srun: $1 has no counterpart in a job of moorage" >&2
    exit 64
}

# the words of the command are left in "$@"
run_tasks() {
    local tasks=$SLURM_NTASKS_PER_NODE nodes=$SLURM_NNODES
    while [[ ${1-} == -* ]]; do
        case $1 in
            --) shift; break ;;
            -w | -w?* | --nodelist* | -x | -x?* | --exclude* | --mpi* | --multi-prog* | --het-group* | --jobid* | --pty | -r | -r?* | --relative*)
                refuse "${1%%=*}" ;;
            -n | --ntasks) set_tasks "$2"; shift 2 ;;
            -n?*) set_tasks "${1#-n}"; shift ;;
            --ntasks=*) set_tasks "${1#*=}"; shift ;;
            --ntasks-per-node=*) tasks=${1#*=}; shift ;;
            --ntasks-per-node) tasks=$2; shift 2 ;;
            -[NcptJGADmeioqCdLTS] | --nodes | --cpus-per-task | --gpus | --gpus-per-task | --gpus-per-node | --gres | \
                --mem | --mem-per-cpu | --time | --job-name | --output | --error | --chdir | --cpu-bind | --gpu-bind | \
                --export | --partition | --account | --distribution | --threads-per-core) shift 2 ;;
            *) shift ;;
        esac
    done
    [[ $# -gt 0 ]] || { echo "srun: no command" >&2; exit 64; }
    if ((tasks == 0)); then
        exit 0 # another host has the only task
    fi
    local pids=() code=0 at
    for ((at = 0; at < tasks; at++)); do
        (
            export SLURM_LOCALID=$at SLURM_PROCID=$((SLURM_NODEID * tasks + at)) SLURM_NTASKS=$((nodes * tasks))
            if ((tasks > 1)); then
                export RANK=$SLURM_PROCID LOCAL_RANK=$at WORLD_SIZE=$SLURM_NTASKS
            fi
            exec "$@"
        ) &
        pids+=($!)
    done
    trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
    trap 'kill -USR1 "${pids[@]}" 2>/dev/null' USR1
    trap 'kill -USR2 "${pids[@]}" 2>/dev/null' USR2
    for at in "${pids[@]}"; do
        local ended=129
        while wait "$at"; ended=$?; ((ended > 128)) && kill -0 "$at" 2>/dev/null; do :; done # a signal ends a wait
        ((code == 0)) && code=$ended
    done
    exit "$code"
}

set_tasks() {
    if (($1 % SLURM_NNODES == 0)); then
        tasks=$(($1 / SLURM_NNODES))
    elif (($1 == 1)); then
        tasks=$((SLURM_NODEID == 0 ? 1 : 0)) nodes=1
    else
        refuse "--ntasks=$1 on $SLURM_NNODES hosts"
    fi
}

case ${0##*/} in
    srun) run_tasks "$@" ;;
    scontrol)
        [[ ${1-} == show && ${2-} == hostname* ]] || { echo "scontrol: only show hostnames is there" >&2; exit 64; }
        echo "${MASTER_ADDR:-$(hostname)}" # of the first host: it is the one that the others meet at
        exit 0 ;;
esac

own=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$own/.slurm"
for name in srun scontrol; do
    ln -sf "$own/as_slurm.sh" "$own/.slurm/$name"
    chmod +x "$own/as_slurm.sh"
done
export PATH="$own/.slurm:$PATH"
export SLURM_NODEID=${RANK:-0} SLURM_PROCID=${RANK:-0} SLURM_LOCALID=0
export SLURM_JOB_ID=$MOORAGE_JOB SLURM_JOBID=$MOORAGE_JOB SLURM_SUBMIT_DIR=$PWD SLURM_RESTART_COUNT=$((MOORAGE_ATTEMPT - 1))
export SLURM_JOB_NUM_NODES=$SLURM_NNODES SLURM_NPROCS=$SLURM_NTASKS SLURM_TASKS_PER_NODE=$SLURM_NTASKS_PER_NODE
export SLURM_JOB_NODELIST=${MASTER_ADDR:-$(hostname)} SLURMD_NODENAME=$MOORAGE_WORKER
export SLURM_NODELIST=$SLURM_JOB_NODELIST SLURM_TMPDIR=${TMPDIR:-/tmp}
if [[ -n ${SLURM_ARRAY_TASK_COUNT-} ]]; then
    export SLURM_ARRAY_JOB_ID=$MOORAGE_JOB SLURM_ARRAY_TASK_ID=$MOORAGE_INDEX
fi
exec "$@"

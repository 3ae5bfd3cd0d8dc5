# One job of the demo: checks its own environment, leaves its mark, holds its GPUs for a while.
# $1 the record that all jobs append to, $2 seconds to hold, $3 GPUs asked for, $4 what to do: ok, flaky, poison
record=$1 hold=$2 gpus=$3 kind=$4
name="$MOORAGE_JOB $MOORAGE_REPLICA $MOORAGE_ATTEMPT $MOORAGE_FENCE"
fail() { echo "bad $name $1" >>"$record"; exit 97; }

[ -n "$MOORAGE_FENCE" ] && [ -n "$MOORAGE_TENANT" ] || fail no-name
[ "$CUDA_VISIBLE_DEVICES" = "$MOORAGE_GPU_INDICES" ] || fail other-devices
[ -z "$MOORAGE_LEDGER_URL$MOORAGE_DEMO_CANARY" ] || fail inherited-environment
if [ -n "$MOORAGE_GPU_UUIDS" ]; then
    commas=$(echo "$MOORAGE_GPU_UUIDS" | tr -cd , | wc -c)
    [ $((commas + 1)) -eq "$gpus" ] || fail other-count
    [ "$CUDA_DEVICE_ORDER" = PCI_BUS_ID ] || fail other-order
else
    [ "$gpus" -eq 0 ] || fail no-devices
fi

echo "start $name $(date +%s%N) ${MOORAGE_GPU_UUIDS:--}" >>"$record"
sleep "$hold"
code=0
[ "$kind" = poison ] && code=3
[ "$kind" = flaky ] && [ "$MOORAGE_ATTEMPT" -eq 1 ] && code=1
echo "end $name $(date +%s%N) $code" >>"$record"
exit $code

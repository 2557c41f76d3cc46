# Rounds of latencies and rates, ours and perftest's in turn. Each leaves what it prints in /share/results.
results=/share/results
mkdir -p "$results"

# perftest NAME PROGRAM OPTIONS...: one side serves, the other prints.
perftest() {
    local name="$1" program="$2"
    shift 2
    "$program" -d rxe0 -F -n "$iterations" "$@" >/dev/null 2>&1 &
    # It waits for its other side on port 18515.
    until grep -q ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6; do
        kill -0 $! 2>/dev/null || return 1
        usleep 10000
    done
    "$program" -d rxe0 -F -n "$iterations" "$@" 10.0.0.1 >"$results/$round.$name" 2>/tmp/perftest || {
        cat /tmp/perftest
        return 1
    }
    wait $!
}

round=1
while [ "$round" -le "$rounds" ]; do
    verbs_latency --device rxe0 --iterations "$iterations" >"$results/$round.ours" || exit 1
    perftest read_8 ib_read_lat -s 8 || exit 1
    perftest read_1024 ib_read_lat -s 1024 || exit 1
    perftest compare_swap ib_atomic_lat -A CMP_AND_SWAP || exit 1
    perftest write_8_half_ping_pong ib_write_lat -s 8 || exit 1
    for bytes in 8 1024; do
        for depth in 1 16; do
            perftest "read_rate_$bytes.$depth" ib_read_bw -s "$bytes" -t "$depth" || exit 1
        done
    done
    echo "round $round of $rounds"
    round=$((round + 1))
done

# What perftest measures in this guest, by the names of our example. Leaves what it prints in /share/results.
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

# theirs NAME: what perftest has for it.
theirs() {
    case "$1" in
    read_8) perftest "$1" ib_read_lat -s 8 ;;
    read_1024) perftest "$1" ib_read_lat -s 1024 ;;
    compare_swap) perftest "$1" ib_atomic_lat -A CMP_AND_SWAP ;;
    write_8_half_ping_pong) perftest "$1" ib_write_lat -s 8 ;;
    read_rate_*)
        for depth in 1 16; do
            # A completion for each READ, as ours has: else it lets all that are in flight end before it posts again.
            perftest "$1.$depth" ib_read_bw -s "${1#read_rate_}" -t "$depth" -Q 1 || return 1
        done
        ;;
    esac
}

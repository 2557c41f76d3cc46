#!/bin/sh
# farlink's programs as processes of their own, over verbs: `programs.sh CASE`.
set -eu
export FARLINK_SECRET=5a9f0c1d7e3b42866d10f2c4b8e7a935
at=${AT:-127.0.0.1}
servers=
# Whoever fails leaves no memory server behind.
trap 'for server in $servers; do kill -KILL "$server" 2>/dev/null || true; done' EXIT
device="--device rxe0"

fail() {
    echo "FAILED: $*"
    exit 1
}

# serve NUMBER OF ADDRESS PORT OPTIONS...: starts a memory server and waits until it is ready.
serve() {
    local number=$1 of=$2 address=$3 port=$4
    shift 4
    rm -f "/tmp/server-$number"
    farlink serve --fabric verbs $device --server "$number" --servers "$of" --listen "$address:$port" --bytes 128MiB \
        "$@" >"/tmp/server-$number" 2>&1 &
    servers="$servers $!"
    until grep -qs "server $number ready" "/tmp/server-$number"; do
        kill -0 $! 2>/dev/null || fail "a memory server does not start: $(cat "/tmp/server-$number")"
        usleep 20000
    done
}

# Ends the memory servers as a user would.
stop() {
    local server
    for server in $servers; do
        kill -TERM "$server"
        wait "$server" || fail "a memory server ended with $?: $(cat /tmp/server-*)"
    done
    servers=
}

bench() {
    farlink bench --connect "verbs://$at:7471,$at:7472" $device "$@"
}

two_servers() {
    serve 0 2 "$at" 7471
    serve 1 2 "$at" 7472
}

# Milliseconds since the guest has started.
now_ms() {
    local up
    read -r up _ </proc/uptime
    echo "${up%.*}${up#*.}0"
}

# A bench and a check as a user runs them.
serve_and_bench() {
    two_servers
    bench --keys 8000 --ops 500 --workers 2 --in-flight 1,16 --mix a,b,c,d,e,f
    bench --keys 8000 --ops 1000 --workers 1 --processes 2 --mix a --tree shared
    # Each owns a share, and asks the other for the rest.
    bench --keys 20000 --ops 1000 --workers 1 --processes 2 --in-flight 16 --mix a,c --access cached --cache 8% --tree cached
    farlink check --connect "verbs://$at:7471,$at:7472" $device
    stop
}

# A memory server as users run it, whose threads carry out what other processes ship.
serve_and_ship() {
    serve 0 1 "$at" 7471 --threads 1
    farlink-stress --fabric verbs --connect "$at:7471" --seconds 4 --processes 2 --workers 1 --access coarse --keys 200
    farlink check --connect "verbs://$at:7471" $device
    stop
}

# Who does not know the secret gets nothing, and who knows it is served all the same.
without_the_secret() {
    two_servers
    bench --keys 2000 --ops 500 --mix c --workers 1
    local said
    for secret in 0123456789abcdef0123456789abcdef ""; do
        if said=$(FARLINK_SECRET=$secret bench --keys 2000 --ops 500 --mix c --workers 1 2>&1); then
            fail "served a client with the secret '$secret': $said"
        fi
        echo "refused: $said" | head -n 3
        case $said in
        *secret*) ;;
        *) fail "the refusal does not name the secret" ;;
        esac
    done
    farlink check --connect "verbs://$at:7471,$at:7472" $device
    stop
}

# Random bytes, half a greeting, and connections that say nothing, while a bench runs.
random_bytes() {
    two_servers
    rm -f /tmp/bench
    bench --keys 5000 --ops 1000 --mix a --workers 1 >/tmp/bench 2>&1 &
    local bench=$! count=0 silent=
    while kill -0 "$bench" 2>/dev/null; do
        count=$((count + 1))
        head -c $((count * 37 % 5000)) /dev/urandom | timeout 1 nc "$at" 7471 >/tmp/answer 2>/dev/null || true
        head -c $((count % 64)) /dev/zero | timeout 1 nc "$at" 7472 >/dev/null 2>&1 || true
        if [ $((count % 4)) = 0 ]; then
            (sleep 3 | nc "$at" 7471 >/dev/null 2>&1 || true) &
        fi
    done
    wait "$bench" || fail "the bench failed: $(cat /tmp/bench)"
    echo "$count clients sent random bytes"
    [ "$count" -gt 4 ] || fail "too few to prove anything"
    cat /tmp/bench
    farlink check --connect "verbs://$at:7471,$at:7472" $device
    stop
}

# until_said TEXT: waits until the bench under way has said so.
until_said() {
    until grep -qs "$1" /tmp/bench; do
        kill -0 "$bench" || fail "the bench ended too early: $(cat /tmp/bench)"
        usleep 20000
    done
}

# kill -9 of a memory server: whoever uses it says so within two seconds, also while it prepares what it is to do, while it
# finds all that it needs in its cache, and while an empty one takes its place.
killed_server() {
    # Until a deadline a million operations are drawn first, which takes a minute here.
    kill_in "preparing ycsb-a" no --seconds 10 --mix a
    kill_in ycsb-a no --ops 40000 --mix a
    kill_in ycsb-c no --ops 400000 --mix c --access cached --cache 4MiB
    kill_in ycsb-a replaced --ops 40000 --mix a
}

# until_ended COMMAND...: runs it, and leaves its exit code and when it has ended.
until_ended() {
    local code=0
    "$@" >/tmp/bench 2>&1 || code=$?
    echo "$code $(now_ms)" >/tmp/ended
}

# kill_in STEP REPLACED OPTIONS...: kills a memory server in that step of a bench with these options, and puts an empty one in its
# place if it is to be replaced.
kill_in() {
    local step=$1 replaced=$2 bench begun code took
    shift 2
    two_servers
    rm -f /tmp/bench
    until_ended bench --keys 5000 --workers 2 --in-flight 4 "$@" &
    bench=$!
    until_said "step 2 of 3: $step"
    case $step in
    preparing*) ;;
    # Operations are to be under way.
    *) sleep 1 ;;
    esac
    set -- $servers
    begun=$(now_ms)
    kill -KILL "$2"
    touch /tmp/killed
    servers=$1
    [ "$replaced" = no ] || serve 1 2 "$at" 7472
    wait "$bench"
    # Not when it is waited for: the empty one takes its time to start.
    read -r code took </tmp/ended
    took=$((took - begun))
    cat /tmp/bench
    echo "killed at $(stat -c %y /tmp/killed)"
    echo "the bench ended with $code, $took ms after the kill"
    [ "$code" != 0 ] || fail "the bench says that all is well"
    case $step in
    preparing*) ! grep -q "step 2 of 3: ycsb" /tmp/bench || fail "it was not preparing any more" ;;
    esac
    [ "$took" -lt 2000 ] || fail "it took $took ms"
    grep -qi "server 1" /tmp/bench || fail "it does not name memory server 1"
    stop
}

# A memory server whose process is stopped: who has it carry something out says so after 1.5 s, and leaves at once.
stopped_server() {
    local bench begun code took access
    for access in coarse "engine --policy always --cache 64KiB"; do
        serve 0 1 "$at" 7471 --threads 1
        rm -f /tmp/bench
        farlink bench --connect "verbs://$at:7471" $device --keys 5000 --workers 2 --in-flight 4 --mix a --ops 40000 \
            --access $access >/tmp/bench 2>&1 &
        bench=$!
        until_said "step 2 of 3: ycsb-a"
        # Operations are to be under way.
        sleep 1
        begun=$(now_ms)
        kill -STOP $servers
        code=0
        wait "$bench" || code=$?
        took=$(($(now_ms) - begun))
        kill -CONT $servers
        cat /tmp/bench
        echo "$access: the bench ended with $code, $took ms after the stop"
        [ "$code" != 0 ] || fail "the bench says that all is well"
        grep -q "no sign of life" /tmp/bench || fail "it does not say why"
        [ "$took" -lt 3000 ] || fail "it took $took ms"
        farlink check --connect "verbs://$at:7471" $device
        stop
    done
}

# An owner that is killed: the bench says so, and the tree is whole.
killed_owner() {
    two_servers
    rm -f /tmp/bench
    farlink bench --connect "verbs://$at:7471,$at:7472" $device --keys 5000 --ops 40000 --mix a --workers 1 --processes 2 \
        --in-flight 4 --access cached --cache 50% --tree owned >/tmp/bench 2>&1 &
    local bench=$! begun code=0 took compute
    until_said "step 2 of 3: ycsb-a"
    sleep 1
    compute=$(cat /proc/"$bench"/task/*/children)
    set -- $compute
    [ $# = 2 ] || fail "the bench should have two compute processes, not: $compute"
    begun=$(now_ms)
    kill -KILL "$2"
    wait "$bench" || code=$?
    took=$(($(now_ms) - begun))
    cat /tmp/bench
    echo "the bench ended with $code, $took ms after the kill"
    [ "$code" != 0 ] || fail "the bench says that all is well"
    farlink check --connect "verbs://$at:7471,$at:7472" $device --tree owned
    farlink repartition --connect "verbs://$at:7471,$at:7472" $device --name owned
    stop
}

# The numbers of the memory servers' queue pairs, a line each. They are known by the threads that made them.
queue_pairs() {
    local server thread
    rdma resource show qp >/tmp/queue-pairs
    for server in $servers; do
        for thread in /proc/"$server"/task/*; do
            sed -n "s/.* lqpn \([0-9]*\) .* pid ${thread##*/} .*/\1/p" /tmp/queue-pairs
        done
    done
}

# queue_pairs_left NUMBERS: how many of these there still are, whoever has them: of those that a thread has made which has
# ended, nobody is named.
queue_pairs_left() {
    local number
    rdma resource show qp >/tmp/queue-pairs
    for number in $1; do
        grep " lqpn $number " /tmp/queue-pairs || true
    done | wc -l
}

# kill -9 of a compute server: its memory servers free what it held, and the next compute server goes on.
killed_bench() {
    two_servers
    bench --keys 5000 --ops 500 --mix a --workers 1 --tree others
    local bench compute held left tries=100
    [ -z "$(queue_pairs)" ] || fail "queue pairs are left of a bench that has ended: $(queue_pairs)"
    rm -f /tmp/bench
    farlink bench --connect "verbs://$at:7471,$at:7472" $device --keys 5000 --ops 40000 --mix a --workers 2 \
        --in-flight 4 --tree killed >/tmp/bench 2>&1 &
    bench=$!
    until_said "step 2 of 3: ycsb-a"
    sleep 1
    held=$(queue_pairs)
    # Three endpoints, each with a queue pair to each memory server.
    [ "$(echo "$held" | wc -l)" -ge 6 ] || fail "the bench should have six queue pairs, not: $held"
    # The compute process first: it would leave in good order once its parent has gone.
    compute=$(cat /proc/"$bench"/task/*/children)
    [ -n "$compute" ] || fail "the bench has no compute process"
    kill -KILL $compute "$bench"
    wait "$bench" || true
    left=$(queue_pairs_left "$held")
    while [ "$left" -gt 0 ]; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$left of the queue pairs are left: $held"
        usleep 20000
        left=$(queue_pairs_left "$held")
    done
    echo "the memory servers have destroyed their queue pairs: $(echo $held)"
    bench --keys 5000 --ops 2000 --mix a --workers 2 --tree others
    farlink check --connect "verbs://$at:7471,$at:7472" $device --tree others
    stop
}

# The memory servers of two guests: serves until the host says that it is over.
serve_until_told() {
    two_servers
    until [ -e /share/stop ]; do
        usleep 100000
    done
    stop
    /bin/tc -s qdisc show dev eth0
}

# The compute side of two guests, across a network that loses packets.
over_the_net() {
    local tries=300
    until nc -w 1 "$at" 7472 </dev/null >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "the other guest does not serve"
        usleep 100000
    done
    # First, while the memory holds nothing else: it wants every byte accounted for. Few keys, so that pages split and merge.
    farlink-stress --fabric verbs --connect "$at:7471,$at:7472" --seconds 12 --processes 2 --workers 1 --in-flight 4 --keys 120
    bench --keys 4000 --ops 150 --workers 2 --in-flight 1,16 --mix a,c
    bench --keys 4000 --ops 150 --workers 1 --processes 2 --in-flight 16 --mix a --access cached --cache 100% --tree owned
    farlink check --connect "verbs://$at:7471,$at:7472" $device
    /bin/tc -s qdisc show dev eth0 | tee /tmp/qdisc
    grep -q "dropped [1-9]" /tmp/qdisc || fail "no packet was lost: the test has not tested it"
}

"$@"

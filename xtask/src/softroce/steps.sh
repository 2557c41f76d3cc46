# Runs steps one after the other, shows what they say, and counts those that fail.
failures=/tmp/failures
: >"$failures"

# Where the threads of a process stand: name, state, processor time in ticks, and what of the kernel they are in.
threads_of() {
    local task
    for task in /proc/"$1"/task/*; do
        # Names have blanks.
        echo "-- $(cat "$task/comm"): state, time: $(sed 's/.*) //' "$task/stat" | cut -d ' ' -f 1,12,13), system call: $(cat "$task/syscall")"
        cat "$task/stack"
    done 2>/dev/null
}

# step NAME SECONDS COMMAND...
step() {
    local name="$1" limit="$2" begun code command watcher
    shift 2
    echo "== $name"
    begun=$(date +%s)
    "$@" </dev/null &
    command=$!
    (
        # It outlives the step, and must not hold its output.
        sleep "$limit" >/dev/null 2>&1
        threads_of "$command"
        kill -KILL "$command"
    ) &
    watcher=$!
    wait "$command"
    code=$?
    kill "$watcher" 2>/dev/null
    case $code in
    0) echo "== $name: ok, $(($(date +%s) - begun)) s" ;;
    137) echo "== $name: FAILED: killed after $(($(date +%s) - begun)) s of $limit" | tee -a "$failures" ;;
    *) echo "== $name: FAILED with exit code $code" | tee -a "$failures" ;;
    esac
}

# A step of a lane that runs beside others: what it says is shown when it is over, so that steps do not speak at once.
aside() {
    local said="/tmp/said-$1"
    step "$@" >"$said" 2>&1
    until mkdir /tmp/speaking 2>/dev/null; do
        usleep 20000
    done
    cat "$said"
    rmdir /tmp/speaking
}

# Ends the script with the result of all steps.
verdict() {
    if [ ! -s "$failures" ]; then
        echo "== all steps passed"
        exit 0
    fi
    echo "== $(wc -l <"$failures") steps FAILED:"
    cat "$failures"
    exit 1
}

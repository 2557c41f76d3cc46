# Runs steps one after the other, shows what they say, and counts those that fail.
failures=/tmp/failures
: >"$failures"

# step NAME SECONDS COMMAND...
step() {
    local name="$1" limit="$2" begun code
    shift 2
    echo "== $name"
    begun=$(date +%s)
    timeout -s KILL "$limit" "$@" </dev/null
    code=$?
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

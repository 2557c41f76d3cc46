# Runs steps one after the other, shows what they say, and counts those that fail.
failed=0

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
    137) echo "== $name: FAILED: killed after $(($(date +%s) - begun)) s of $limit"; failed=$((failed + 1)) ;;
    *) echo "== $name: FAILED with exit code $code"; failed=$((failed + 1)) ;;
    esac
}

# Ends the script with the result of all steps.
verdict() {
    if [ "$failed" = 0 ]; then
        echo "== all steps passed"
        exit 0
    fi
    echo "== $failed steps FAILED"
    exit 1
}

# Rounds of latencies and rates. What is compared is measured one right after the other, ours first in every other round.
ours() {
    verbs_latency --device rxe0 --iterations "$iterations" --only "$1" >"$results/$round.ours.$1"
}

round=1
while [ "$round" -le "$rounds" ]; do
    for name in $names; do
        if [ $((round % 2)) -eq 1 ]; then
            ours "$name" && theirs "$name" || exit 1
        else
            theirs "$name" && ours "$name" || exit 1
        fi
    done
    echo "round $round of $rounds"
    round=$((round + 1))
done

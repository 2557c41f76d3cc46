# Rounds of a bench, each right after a look at what a READ takes here.
iterations=2000
round=1
while [ "$round" -le "$rounds" ]; do
    theirs read_8 && sh /tmp/programs.sh million_keys "$ops" >"$results/$round.bench" 2>/tmp/bench || {
        cat "$results/$round.bench" /tmp/bench
        exit 1
    }
    echo "round $round of $rounds"
    round=$((round + 1))
done

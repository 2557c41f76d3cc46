//! Benches with caches, and of owners.

use crate::{bench, named, number, table_of};

#[test]
fn a_cache_of_its_own_spares_reads_and_atomics() {
    let said =
        bench("--json --keys 20000 --access cached --cache 512KiB --mix c,a --ops 20000 --in-flight 4").must_hold();
    let rows = said.json();
    for name in ["ycsb-c", "ycsb-a"] {
        let row = named(&rows, name)[0];
        assert_eq!((&row["access"], &row["cache_bytes"]), (&"cached".into(), &(512 << 10).into()));
        // All but the leaves are cached, and of those the hot ones.
        assert!(number(row, "reads_per_op") < 0.5 && number(row, "hit_ratio") > 0.8, "{row}");
        assert_eq!((number(row, "inner_misses_per_op"), number(row, "atomics_per_op")), (0.0, 0.0));
    }
    // The tree that is checked is the one in remote memory.
    assert!(number(named(&rows, "bulk-load")[0], "flushed_pages") > 0.0);
    assert!(number(named(&rows, "ycsb-a")[0], "flushed_pages") > 0.0);
    assert_eq!(number(named(&rows, "ycsb-c")[0], "flushed_pages"), 0.0);
    assert_eq!(named(&rows, "btree")[0]["ok"], true);
}

/// Each process owns a third of the keys, and draws from all: two thirds of the operations are others' to do.
#[test]
fn several_processes_own_a_structure() {
    let said = bench(
        "--json --keys 20000 --access cached --cache 512KiB --processes 3 --workers 1 --in-flight 4 --ops 6000 \
         --mix read-only,insert-intensive,scan-intensive --distribution uniform",
    )
    .must_hold();
    let rows = said.json();
    for name in ["read-only", "insert-intensive", "scan-intensive"] {
        let row = named(&rows, name)[0];
        let messages = number(row, "two_sided_per_op");
        assert!((0.6..0.75).contains(&messages), "{row}");
        assert!(number(row, "hit_ratio") > 0.5, "{row}");
    }
    assert!(number(named(&rows, "insert-intensive")[0], "flushed_pages") > 0.0);
    assert!(number(named(&rows, "read-only")[0], "atomics_per_op") < 0.01);
    assert_eq!(named(&rows, "btree")[0]["ok"], true);
    bench("--keys 20000 --access engine --processes 2 --workers 1 --ops 2000 --mix write-intensive").must_hold();
}

/// Where a structure cannot be owned in part, each has one of its own, which together are one.
#[test]
fn several_processes_own_a_part_each() {
    let options = "--json --keys 8000 --access cached --processes 3 --workers 1 --ops 1500";
    let rows = bench(&format!("{options} --structure rtree --mix search-large,mixed-large,point")).must_hold().json();
    // A search asks both others, an insert the one that has it.
    let messages = |rows, mix| number(named(rows, mix)[0], "two_sided_per_op");
    for (mix, expected) in [("search-large", 2.0..2.05), ("mixed-large", 1.8..1.95), ("point", 2.0..2.05)] {
        assert!(expected.contains(&messages(&rows, mix)), "{mix}: {} messages", messages(&rows, mix));
    }
    assert_eq!(rows.iter().filter(|row| row["kind"] == "check").count(), 7);
    let rows = bench(&format!("{options} --structure skiplist --mix c,e --distribution uniform")).must_hold().json();
    let said = messages(&rows, "ycsb-c");
    assert!((0.6..0.75).contains(&said), "{said} messages");
}

#[test]
fn every_mix_through_a_small_cache() {
    let said = bench(
        "--keys 10000 --access cached --cache 192KiB --workers 3 --in-flight 4 --ops 1000 --page-bytes 512 --nasty \
         --rounds 1 --mix a,b,c,d,e,f,insert-intensive --load insert",
    )
    .must_hold();
    for part in ["btree, cached: 2 memory servers, 3 workers", "cache of 192.00 KiB", "after round 1", "hit"] {
        assert!(said.out.contains(part), "no `{part}` in: {}", said.out);
    }
    assert!(table_of(&said.out).all(|line| line.chars().count() <= 80), "{}", said.out);
}

/// Hits are those of all its operations, and of pages of all levels.
#[test]
fn a_mapping_cache_has_a_hit_ratio() {
    let options = "--structure bwtree --access cached-mapping --keys 5000 --cache 1MiB --ops 5000 --in-flight 2 --json";
    let rows = bench(&format!("{options} --mix c --distribution uniform")).must_hold().json();
    let row = named(&rows, "ycsb-c")[0];
    assert!((0.5..1.0).contains(&number(row, "hit_ratio")) && row["admission"].is_null(), "{row}");
    for by_level in ["leaf_misses_per_op", "inner_misses_per_op", "misses_by_level"] {
        assert!(row[by_level].is_null(), "{row}");
    }
}

/// All pages are cached, and nobody else is there: a get is a READ of a word, and a put a WRITE and a swap; every fifth one of a
/// page makes a new base, and marks five records as free.
#[test]
fn a_mapping_cache_spares_all_but_a_word_or_a_swap() {
    let options = "--structure bwtree --access cached-mapping --keys 2000 --cache 4MiB --workers 1 --ops 10000 --json";
    let rows = bench(&format!("{options} --mix c,c,update100 --distribution uniform")).must_hold().json();
    let [get, put] = [named(&rows, "ycsb-c")[1], named(&rows, "update100")[0]];
    // Whoever begins looks at some words, asks who else writes, and fetches pages to allocate from.
    let expected = [
        (get, "reads", 1.0..1.01),
        (get, "bytes", 8.0..8.1),
        (get, "round_trips", 1.0..1.01),
        (put, "atomics", 1.0..1.01),
        (put, "round_trips", 1.0..1.01),
        (put, "reads", 0.0..0.01),
        // The last puts of a page do not come to five.
        (put, "writes", 1.95..2.01),
    ];
    for (row, count, expected) in expected {
        assert!(expected.contains(&number(row, &format!("{count}_per_op"))), "{count}: {row}");
    }
    assert_eq!(["writes_per_op", "atomics_per_op"].map(|count| number(get, count)), [0.0, 0.0], "{get}");
    assert_eq!(number(&get["counts_per_op"], "consolidations"), 0.0, "{get}");
    assert!((0.19..=0.2).contains(&number(&put["counts_per_op"], "consolidations")), "{put}");
}

#[test]
fn the_smallest_cache_is_loaded_through_and_refuses_what_it_cannot_run() {
    bench("--access cached --cache 64KiB --page-bytes 4096 --keys 20000 --mix c --ops 100").must_hold();
    let said = bench("--access cached --cache 64KiB --keys 2000 --workers 8 --in-flight 1000 --mix a --ops 100");
    said.must_fail_with(&["--cache 65536 has room for 64 pages", "8000 operations in flight"]);
}

#[test]
fn processes_share_a_tree_through_caches_of_inner_pages() {
    let said = bench(
        "--json --keys 20000 --access cached-inner --processes 2 --in-flight 4 --ops 2000 --nasty --rounds 1 \
         --mix c,a,d,e,f,insert-intensive",
    )
    .must_hold();
    let rows = said.json();
    let row = named(&rows, "ycsb-c")[0];
    assert_eq!((&row["access"], &row["flushed_pages"]), (&"cached-inner".into(), &0.into()));
    // A leaf is read each time, past the cache.
    assert!((1.0..1.2).contains(&number(row, "reads_per_op")), "{row}");
    assert!((0.6..0.67).contains(&number(row, "hit_ratio")), "{row}");
    assert!(named(&rows, "ycsb-a")[0]["atomics_per_op"].as_f64().unwrap() > 0.4);
}

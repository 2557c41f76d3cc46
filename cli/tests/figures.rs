//! Figures at small sizes: their rows, and what must hold of them. Speed is not asked: in runs so short it means nothing.

use std::process::{Command, Stdio};

use serde_json::Value;

/// Whether a figure held, what it printed, and its plot.
fn figure(name: &str, options: &str) -> (bool, Vec<Value>, String) {
    let folder = tempfile::tempdir().unwrap();
    let (ok, text) = run(&format!("{name} --json {options}"), folder.path().to_str());
    let plot = std::fs::read_to_string(folder.path().join(format!("{name}.svg"))).unwrap_or_default();
    let parsed = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {text}"));
    (ok, text.lines().map(parsed).collect(), plot)
}

fn run(line: &str, out: Option<&str>) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farlink"));
    command.arg("figure").args(line.split_whitespace()).args(out.iter().flat_map(|out| ["--out", out]));
    let output = command.stdin(Stdio::null()).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(!errors.contains("panicked"), "{errors}");
    let said = if output.stdout.is_empty() { errors } else { String::from_utf8(output.stdout).unwrap() };
    (output.status.success(), said)
}

/// Whether all but the checks fits a terminal.
fn is_narrow(text: &str) -> bool {
    text.lines().all(|line| line.chars().count() <= 80)
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("{field}: {row}"))
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["name"].as_str().unwrap()).collect()
}

/// Every row of `to-copy` is counted, the paper's, or what the paper says beside what is here; counts do not depend on how many
/// messages are sent.
#[test]
fn copies_and_gathers_are_counted() {
    let (ok, lines, plot) = figure("to-copy", "--messages 2 --updates 320");
    assert!(ok, "{lines:?}");
    let (checks, rows): (Vec<&Value>, Vec<&Value>) = lines.iter().partition(|line| line["kind"] == "check");
    assert!(checks.iter().all(|check| check["ok"] == true) && checks.len() == 7, "{checks:?}");
    for figure in 3..=6 {
        let name = format!("the lines of figure {figure} are in the paper's order");
        assert!(checks.iter().any(|check| check["name"] == name), "{checks:?}");
    }
    let (paper, counted): (Vec<&Value>, Vec<&Value>) = rows.into_iter().partition(|row| row["source"] == "paper");
    let (words, counted): (Vec<&Value>, Vec<&Value>) = counted.into_iter().partition(|row| row["source"] == "compared");
    assert!(counted.len() > 30 && words.len() >= 12);
    // Throughput, and shares of the processor; of the figures without points in the text there are words.
    for (field, least) in [("gb_per_s", 6), ("processor_percent", 2), ("copying_percent", 1)] {
        let of_field: Vec<&&Value> = paper.iter().filter(|row| row[field].is_f64()).collect();
        assert!(of_field.len() >= least, "{field}: {paper:?}");
        for said in of_field {
            let is_it =
                |row: &&&Value| ["name", "record_bytes", "message_bytes"].iter().all(|field| row[field] == said[field]);
            let here = counted.iter().find(is_it).unwrap_or_else(|| panic!("nothing counted beside {said}"));
            let times = number(here, field) / number(said, field);
            assert!((0.8..1.25).contains(&times), "{said}\n{here}");
        }
    }
    for row in &words {
        assert!(number(row, "paper") > 0.0 && number(row, "here") > 0.0, "{row}");
    }
    for figure in 3..=6 {
        assert!(words.iter().any(|row| row["figure"] == figure), "{words:?}");
    }
    for row in counted.into_iter().filter(|row| row["message_bytes"].is_f64()) {
        let (copied, entries) = (number(row, "copied_bytes_per_message"), number(row, "entries_per_message"));
        let copies = row["name"] == "copy-out";
        assert_eq!(copied, if copies { number(row, "message_bytes") } else { 0.0 }, "{row}");
        assert!(if copies { entries == 1.0 } else { (1.0..=32.0).contains(&entries) }, "{row}");
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, text) = run("to-copy --messages 1 --updates 32", folder.path().to_str());
    assert!(is_narrow(&text.replace(folder.path().to_str().unwrap(), "")), "{text}");
    for title in ["figure 3", "figure 4", "figure 5", "figure 6", "client-merged, 128 B"] {
        assert!(plot.contains(title), "{title}");
    }
}

#[test]
fn table_2_has_its_rows_in_order_and_they_make_sense() {
    let options =
        "--keys 20000 --warm-up-ops 8000 --compute-servers 1 --memory-servers 2 --cache-percent 32 --in-flight 2";
    let output = Command::new(env!("CARGO_BIN_EXE_farlink"))
        .args(["figure", "dex-table2", "--json"])
        .args(options.split(' '))
        .args(["--ops", "6000"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let papers = ["DEX", "Sherman", "SMART", "P-Sherman", "P-SMART"];
    let public = ["DEX's public code", "DEX's public code, no offload"];
    let ours = [
        "farlink FG",
        "farlink, shared-everything",
        "farlink, P-Sherman",
        "farlink, owned ranges",
        "farlink, shipped",
        "static optimum",
    ];
    let mix = [&papers[..], &public, &ours].concat();
    assert_eq!(names(&lines), [&mix[..], &mix, &ours[..5], &["btree"]].concat());
    let check = lines.last().unwrap();
    let inserted = check["entries"].as_u64().unwrap() - 20_000;
    // Five rows of 6000 operations, half of them inserts.
    assert!(check["ok"] == true && (14_300..15_700).contains(&inserted), "{check}");
    for mix in [&lines[7..13], &lines[20..26]] {
        let [fine, shared, private, owned, shipped, best] = mix else { panic!("six rows") };
        // Two in flight may meet on a page, and one of them begins anew.
        assert!((3.0..3.05).contains(&number(fine, "reads_per_op")), "{fine}");
        assert_eq!(fine["hit_ratio"], Value::Null);
        // One leaf is read each time; the inner pages are all cached.
        assert!((1.0..1.05).contains(&number(shared, "reads_per_op")), "{shared}");
        assert!((0.65..0.67).contains(&number(shared, "hit_ratio")), "{shared}");
        // The same, without a lock in memory; a leaf that is being written can be used meanwhile.
        let is_written = private["mix"] == "write-intensive";
        assert!((if is_written { 0.5 } else { 0.95 }..1.05).contains(&number(private, "reads_per_op")), "{private}");
        assert_eq!(number(private, "atomics_per_op"), 0.0, "{private}");
        assert!(number(owned, "reads_per_op") >= number(best, "reads_per_op"), "{owned}\n{best}");
        assert!((1.0..1.6).contains(&number(owned, "leaf_misses_over_optimum")), "{owned}");
        assert!(number(shared, "leaf_misses_over_optimum") > number(owned, "leaf_misses_over_optimum"));
        assert_eq!(number(best, "leaf_misses_over_optimum"), 1.0);
        assert_eq!((number(owned, "atomics_per_op"), &owned["in_flight"]), (0.0, &2.into()));
        // The leaves of what is shipped are no misses, so that fewer than the least mean nothing.
        assert_eq!(shipped["leaf_misses_over_optimum"], Value::Null);
        // What it would read and not keep, it has others do.
        let (messages, reads) = (number(shipped, "two_sided_per_op"), number(shipped, "reads_per_op"));
        assert!(messages > 0.0 && reads < number(owned, "reads_per_op"), "{shipped}\n{owned}");
        // Pages that are written back, and a log of them, of which one WRITE has several.
        let write_backs = number(owned, "write_backs_per_op");
        assert!((write_backs..=2.0 * write_backs).contains(&number(owned, "writes_per_op")), "{owned}");
        for field in ["source", "access", "mix", "cache_bytes", "cache_percent", "keys", "theta", "warm_up_ops", "seed"]
        {
            assert!(owned.get(field).is_some_and(|value| !value.is_null()), "{field}: {owned}");
        }
    }
    assert_eq!(number(&lines[10], "writes_per_op"), 0.0);
    assert!(number(&lines[23], "write_backs_per_op") > 0.0);
    // One in flight meets nobody: three levels, and one READ of 1 KiB for each.
    let options = options.replace("8000", "100");
    let (ok, text) = run(&format!("dex-table2 --json {} --ops 2000", options.replace("flight 2", "flight 1")), None);
    let fine: Value = text.lines().nth(7).map(|line| serde_json::from_str(line).unwrap()).unwrap();
    assert!(ok && fine["name"] == "farlink FG", "{text}");
    let costs = ["reads_per_op", "bytes_per_op", "writes_per_op", "atomics_per_op"].map(|field| number(&fine, field));
    assert_eq!(costs, [3.0, 3.0 * 1024.0, 0.0, 0.0], "{fine}");
    let (ok, text) = run(&format!("dex-table2 {options} --ops 500"), None);
    assert!(ok && text.contains("\nread-only\n") && text.contains("public code"), "{text}");
    assert!(is_narrow(&text), "{text}");
}

/// Each step of DEX saves remote operations and bytes.
#[test]
fn each_part_of_dex_saves_something() {
    let small = "--keys 20000 --ops 2000 --warm-up-ops 3000 --cache-percent 20";
    let (ok, lines, plot) = figure("dex-ablation", small);
    assert!(ok && lines.len() == 2 * 4 + 1 + 2 * 7, "{lines:?}");
    assert!(lines[8..].iter().all(|check| check["ok"] == true), "{lines:?}");
    for rows in lines[..8].chunks(4) {
        assert_eq!(names(rows), ["base", "+ partition", "+ cache", "+ offloading"]);
        let atomics: Vec<f64> = rows.iter().map(|row| number(row, "atomics_per_op")).collect();
        // To make a segment of the owner's log takes two; operations that are shipped log little, so that some are made late.
        assert!(atomics[0] > 0.4 && atomics[1..3] == [0.0; 2] && atomics[3] <= 2.0 * 2.0 / 2000.0, "{atomics:?}");
        // All but the root is read each time, unless the leaf is still being written.
        assert!((1.7..2.01).contains(&number(&rows[1], "reads_per_op")), "{}", rows[1]);
        assert!(number(&rows[3], "two_sided_per_op") > 0.0 && rows[0]["gain_ops"].is_null());
    }
    assert_eq!(
        (number(&lines[3], "paper_gain"), &lines[0]["theta"], &lines[4]["theta"]),
        (1.55, &0.99.into(), &0.0.into())
    );
    assert!(plot.contains("zipf 0.99") && plot.contains("uniform"));
    let folder = tempfile::tempdir().unwrap();
    let (_, text) =
        run("dex-ablation --keys 20000 --ops 200 --warm-up-ops 200 --cache-percent 20", folder.path().to_str());
    assert!(text.contains("+ offloading") && is_narrow(&text), "{text}");
}

#[test]
fn admission_by_probability_has_its_rows_and_never_means_never() {
    let small = "--keys 20000 --warm-up-ops 10000 --cache-percents 25,50 --probabilities 0,0.1";
    let (_, lines, plot) = figure("dex-admission", &format!("{small} --ops 5000"));
    assert_eq!(lines.len(), 2 * 4 + 1 + 3, "{lines:?}");
    for rows in lines[..8].chunks(4) {
        assert_eq!(names(rows), ["probability", "probability", "probability", "frequency"]);
        assert_eq!((number(&rows[0], "probability"), number(&rows[0], "over_always")), (1.0, 1.0));
        let never = &rows[1];
        assert!(number(never, "probability") == 0.0 && number(never, "leaf_misses_per_op") > 0.98, "{never}");
        assert!(rows[3]["probability"].is_null() && number(&rows[3], "over_always") > 1.0, "{}", rows[3]);
    }
    assert!(plot.contains("p = 0.1") && plot.contains("frequency"));
    let folder = tempfile::tempdir().unwrap();
    let few = "--keys 20000 --warm-up-ops 100 --cache-percents 50 --probabilities 0 --ops 100";
    let (ok, text) = run(&format!("dex-admission {few}"), folder.path().to_str());
    // With no probability above 0 there is no best one.
    assert!(ok && !text.contains("always, over"), "{text}");
    assert!(text.contains("cache of 50%") && is_narrow(&text), "{text}");
}

/// The rows over time, of before, during and after; what is timed means nothing here.
#[test]
fn a_region_moves_while_operations_go_on() {
    let small = "--keys 20000 --cache 1M --warm-up 0 --before 100ms --after 100ms --slot 20ms";
    let (_, lines, plot) = figure("dex-repartition", small);
    let of_kind = |kind: &str| lines.iter().filter(|line| line["kind"] == kind).cloned().collect::<Vec<_>>();
    assert_eq!(names(&of_kind("row")), ["before", "during", "after"]);
    assert!(of_kind("row").iter().all(|row| row["keys"] == 20000 && row["seed"] == 1), "{lines:?}");
    let (slots, moves, checks) = (of_kind("slot"), of_kind("move"), of_kind("check"));
    // How much was done by then is not asked: on a busy machine that may be nothing.
    assert!(slots.len() >= 10 && slots.iter().all(|slot| number(slot, "ops") >= 0.0), "{slots:?}");
    assert!(number(&moves[0], "bytes") >= number(&moves[0], "pages_bytes"), "{moves:?}");
    // The structure's, which is not timed.
    assert!(checks.len() == 3 && checks[0]["ok"] == true, "{checks:?}");
    for title in ["Operations", "Remote operations", "Longest wait", "owner 3", "the move"] {
        assert!(plot.contains(title), "{title}");
    }
    let (ok, text) = run("dex-repartition --keys 20000 --compute-servers 1", None);
    assert!(!ok && text.contains("--compute-servers 2 or more"), "{text}");
}

#[test]
fn admission_policies_lie_below_the_optimum() {
    let small = "--keys 20000 --theta 0.6,1.2 --cache-percents 40,64";
    let (ok, lines, plot) = figure("replacement", &format!("{small} --ops 10000 --warm-up-ops 10000"));
    assert!(ok && lines.len() == 2 * 2 * 4 + 1, "{lines:?}");
    for rows in lines[..16].chunks(4) {
        assert_eq!(names(rows), ["always", "probability (DEX)", "frequency", "static optimum"]);
        let ratio = |row: &Value| number(row, "hit_ratio");
        // Counts of a random run: a little luck is possible.
        assert!(rows[..3].iter().all(|row| ratio(row) < ratio(&rows[3]) + 0.01), "{rows:?}");
        assert!(rows.iter().all(|row| row["theta"] == rows[0]["theta"]));
    }
    assert_eq!((&lines[0]["theta"], &lines[15]["theta"], &lines[16]["ok"]), (&0.6.into(), &1.2.into(), &true.into()));
    assert!(plot.contains("zipf 0.6") && plot.contains("zipf 1.2") && plot.contains("frequency"));
    let folder = tempfile::tempdir().unwrap();
    let (ok, text) = run(&format!("replacement {small} --ops 100 --warm-up-ops 100"), folder.path().to_str());
    assert!(ok && text.contains("\nzipf 1.2\n") && text.contains("check btree: ok"), "{text}");
    assert!(is_narrow(&text), "{text}");
}

#[test]
fn every_shipping_policy_does_what_it_says() {
    let small = "--keys 30000 --server-threads 1,2 --cache-percents 4,50 --workers 2 --seconds 0.05 \
                 --warm-up-seconds 0.05 --repeats 1";
    let (_, lines, plot) = figure("offload", small);
    assert_eq!(lines.len(), 4 * 3 + 4, "{lines:?}");
    for rows in lines[..12].chunks(3) {
        assert_eq!(number(&rows[0], "shipped_per_op"), 0.0);
        assert!(number(&rows[1], "shipped_per_op") > 0.0, "{rows:?}");
        assert!(rows.iter().all(|row| number(row, "ops") > 0.0), "{rows:?}");
        assert!(rows.iter().all(|row| row["keys"] == 30000 && row["seed"] == 1), "{rows:?}");
    }
    assert_eq!(lines[12]["ok"], true, "{lines:?}");
    assert!(plot.contains("cost-aware"));
    let folder = tempfile::tempdir().unwrap();
    let (_, text) = run(&format!("offload {small}"), folder.path().to_str());
    assert!(is_narrow(&text) && text.contains("\nover the size of the cache\n"), "{text}");
}

/// An update to the value that is there already writes nothing: no run may repeat what an earlier one has written.
#[test]
fn every_run_writes_what_its_updates_change() {
    let small = "--keys 30000 --server-threads 1,2 --cache-percents 4,50 --workers 2 --repeats 1 \
                 --update-percent 100";
    let is_it = |row: &&Value| row["policy"] == "never" && number(row, "cache_percent") < 10.0;
    // Pages are written once the cache is full of changed ones, which takes longer on a busy machine.
    let lasting = |seconds| figure("offload", &format!("{small} --seconds {seconds} --warm-up-seconds {seconds}")).1;
    let is_enough = |row: &Value| row["ops"].as_f64().is_some_and(|ops| ops >= 1000.0);
    let mut tries = [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8].into_iter().map(lasting);
    let lines = tries.find(|lines| lines.iter().filter(is_it).all(is_enough)).expect("runs of 1000 operations");
    let writes: Vec<f64> = lines.iter().filter(is_it).map(|row| number(row, "writes_per_op")).collect();
    assert!(writes.len() == 3 && writes.iter().all(|count| *count >= writes[0] / 2.0), "{writes:?}");
}

#[test]
fn every_design_costs_what_it_should() {
    let small = "--keys 20000 --clients 2,8 --selectivities 0.01 --seconds 0.03 --warm-up-seconds 0.01";
    let (_, lines, plot) = figure("fg-cg-hybrid", small);
    assert_eq!(lines.len(), 2 * 4 * 2 * 2 + 8 + 2 + 6, "{lines:?}");
    let (rows, checks) = lines.split_at(32);
    assert!(rows.iter().all(|row| number(row, "ops") > 0.0 && row["seed"] == 1), "{rows:?}");
    for (design, messages, reads) in
        [("coarse, range", 1.0, 0.0), ("coarse, hash", 1.0, 0.0), ("hybrid", 1.0, 1.0), ("fine-grained", 0.0, 3.0)]
    {
        let points = rows.iter().filter(|row| row["design"] == design && row["name"] == "point");
        assert_eq!(points.clone().count(), 4);
        for row in points {
            let cost = |field| number(row, field).round();
            assert_eq!((cost("two_sided_per_op"), cost("reads_per_op")), (messages, reads), "{row}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, text) = run(
        "fg-cg-hybrid --keys 2000 --clients 2 --selectivities 0.01 --seconds 0.03 --warm-up-seconds 0.01",
        folder.path().to_str(),
    );
    assert!(is_narrow(&text) && text.contains("\npoint queries, skewed data\n"), "{text}");
    // The trees are sound.
    assert!(checks[..8].iter().all(|check| check["ok"] == true), "{checks:?}");
    assert!(plot.contains("hybrid"));
}

#[test]
fn a_map_of_an_r_tree_has_the_boxes_of_all_levels() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("maps/tree.svg");
    let rects = folder.path().join("rects.csv");
    let grid = (0..900).map(|at| format!("{0},{1},{0},{1}\n", at % 30, at / 30));
    std::fs::write(&rects, grid.collect::<String>()).unwrap();
    let from_file = format!("--rects-file {} --load insert", rects.display());
    for (options, entries) in [("--keys 900 --page-bytes 2048", 900), (&from_file, 900), ("--insert-order rows", 3000)]
    {
        let (ok, text) = run(&format!("rtree-map {} --json {options}", path.display()), None);
        assert!(ok, "{text}");
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (check, levels) = lines.split_last().unwrap();
        assert_eq!((&check["name"], &check["ok"], &check["entries"]), (&"rtree".into(), &true.into(), &entries.into()));
        assert_eq!((&levels[0]["name"], &levels[0]["boxes"]), (&"entries".into(), &entries.into()));
        // Each level is on the picture, with as many boxes as it has pages; only the root's is not.
        let svg = std::fs::read_to_string(&path).unwrap();
        let boxes = |path: &str| path.split("d=\"").nth(1).map(|path| path.matches('M').count());
        let drawn: Vec<usize> = svg.lines().filter(|line| line.starts_with("<path")).filter_map(boxes).collect();
        let counted: Vec<usize> = levels.iter().map(|level| number(level, "boxes") as usize).collect();
        assert_eq!(drawn[..counted.len()], counted, "{options}");
        assert_eq!(drawn[counted.len()..], vec![1; counted.len()], "the legend, {options}");
        assert_eq!(counted[1..].iter().sum::<usize>() + 1, number(check, "pages") as usize, "{options}");
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("level 0: "), "{options}");
    }
    let (ok, text) = run(&format!("rtree-map {}", path.display()), None);
    assert!(ok && is_narrow(&text) && text.contains("wrote "), "{text}");
    let (ok, text) = run("rtree-map /dev/null/tree.svg --keys 10", None);
    assert!(!ok && text.contains("/dev/null"), "{text}");
}

#[test]
fn every_way_to_reach_an_rtree_costs_what_it_should() {
    let small = "--rects 20000 --ops 200 --warm-up-ops 300 --cache-percents 10,50";
    let (ok, lines, plot) = figure("rtree", small);
    assert!(ok && lines.len() == 3 * 10 + 2, "{lines:?}");
    assert!(lines[..30].iter().all(|row| row["seed"] == 1), "{lines:?}");
    for rows in lines[..30].chunks(10) {
        let (pages, levels) = (number(&rows[0], "pages_per_op"), number(&rows[0], "levels"));
        for row in rows {
            // All have made the same searches.
            assert!((number(row, "pages_per_op") - pages).abs() < 0.01, "{row} of {pages} pages");
            let [trips, alone] =
                ["round_trips_per_op", "round_trips_one_at_a_time_per_op"].map(|field| number(row, field));
            let requests = number(row, "reads_per_op") + number(row, "two_sided_per_op");
            assert!(trips <= requests, "{row}");
            // Of another pass, which over a cache misses other pages.
            assert!(trips <= alone || !row["hit_ratio"].is_null(), "{row}");
        }
        let costs = |row: &Value| (number(row, "reads_per_op"), number(row, "two_sided_per_op"));
        assert_eq!((costs(&rows[0]), costs(&rows[7])), ((pages, 0.0), (0.0, 1.0)), "{rows:?}");
        assert_eq!(number(&rows[0], "round_trips_one_at_a_time_per_op"), pages);
        assert!(number(&rows[0], "round_trips_per_op") <= levels + 0.1, "{rows:?}");
        // What an engine ships it need not read.
        assert!(number(&rows[5], "two_sided_per_op") > 0.0, "{rows:?}");
        assert!(number(&rows[5], "reads_per_op") < number(&rows[3], "reads_per_op"), "{rows:?}");
        assert_eq!((rows[9]["source"].as_str(), number(&rows[9], "round_trips_per_op")), (Some("computed"), levels));
    }
    assert!(plot.contains("cached-inner") && plot.contains("scale 1e-2"));
    let folder = tempfile::tempdir().unwrap();
    let (ok, text) = run("rtree --rects 2000 --ops 20 --warm-up-ops 30 --cache-percents 50", folder.path().to_str());
    assert!(ok && is_narrow(&text) && text.contains("\nscale power law\n"), "{text}");
    // The pages of no search fit that.
    let (ok, text) = run("rtree --rects 2000 --ops 20 --warm-up-ops 30 --window 1", folder.path().to_str());
    assert!(ok && !text.contains("levels + 2"), "{text}");
}

/// A smaller one works with nothing: rows say how large it was, not what was asked for.
#[test]
fn the_size_of_the_smallest_cache_is_told() {
    for (name, options) in [
        ("rtree", "--rects 20000 --cache-percents 1,2 --ops 20 --warm-up-ops 30"),
        ("dex-ablation", "--keys 20000 --cache-percent 1 --ops 200 --warm-up-ops 200"),
        (
            "offload",
            "--keys 5000 --server-threads 1 --cache-percents 1 --workers 1 --seconds 0.01 --warm-up 0 --repeats 1",
        ),
    ] {
        let (_, lines, _) = figure(name, options);
        let cached: Vec<&Value> = lines.iter().filter(|row| row["cache_percent"].is_f64()).collect();
        assert!(!cached.is_empty(), "{lines:?}");
        for row in cached {
            assert!(number(row, "cache_bytes") == 65536.0 && number(row, "cache_percent") > 5.0, "{row}");
        }
    }
}

/// With others nothing was measured that they could be compared with. Of inserts as many are made as were asked for.
#[test]
fn the_numbers_of_the_paper_stand_beside_its_own_skew_alone() {
    let small = "--keys 20000 --theta 0.5 --warm-up-ops 200";
    let (_, lines, _) = figure("dex-ablation", &format!("{small} --cache-percent 20 --ops 200"));
    let (skewed, uniform) = (&lines[3], &lines[7]);
    assert_eq!((&skewed["name"], &skewed["paper_gain"]), (&"+ offloading".into(), &Value::Null));
    assert_eq!(number(uniform, "paper_gain"), 1.34);
    let one = "--compute-servers 1 --memory-servers 1 --cache-percent 32";
    let (ok, text) = run(&format!("dex-table2 --json {small} {one} --ops 21000"), None);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (check, rows) = lines.split_last().unwrap();
    assert!(ok && check["name"] == "btree", "{text}");
    let inserting: Vec<&Value> = rows.iter().filter(|row| row["mix"] == "insert-intensive").collect();
    assert!(inserting.len() == 5 && inserting.iter().all(|row| number(row, "ops") == 21000.0), "{inserting:?}");
    assert!(rows.iter().all(|row| row["source"] == "measured" || row["source"] == "computed"), "{rows:?}");
}

#[test]
fn impossible_numbers_are_errors() {
    for (line, says) in [
        ("replacement --keys 1000", "give more --keys"),
        ("replacement --cache-percents 0", "a number above 0"),
        ("replacement --theta 0.5,-1", "--theta must be a number of at least 0"),
        ("dex-admission --keys 1000", "give more --keys"),
        ("dex-admission --probabilities 2", "from 0 to 1"),
        ("dex-table2 --keys 0", "1 or more"),
        ("dex-table2 --keys 50000", "give more --keys"),
        ("dex-table2 --compute-servers 200", "--compute-servers 200"),
        ("offload --repeats 0", "0 is not in 1.."),
        ("offload --workers 0", "0 is not in 1..=63"),
        ("offload --seconds 0", "above 0"),
        ("offload --page-bytes 100", "a power of two"),
        ("offload --fill 2", "0.1 to 1"),
        ("fg-cg-hybrid --clients 300", "300 is not in 1..=200"),
        ("fg-cg-hybrid --selectivities 2", "at most 0.5"),
        ("fg-cg-hybrid --memory-servers 0", "0 is not in 1..=16"),
        ("fg-cg-hybrid --bandwidth 0", "more than zero"),
        ("fg-cg-hybrid --keys 1000 --selectivities 0.0001", "less than one of 1000 keys"),
        ("dex-repartition --slot 1ns", "give a longer --slot"),
        ("dex-repartition --after 50ms", "shorter than two --slot"),
        ("dex-repartition --before 10ms", "shorter than a --slot"),
        ("to-copy --updates 99", "--updates 100 at least"),
        ("rtree-map /tmp/x.svg --rects-file /nowhere/r", "cannot read the rectangles file /nowhere/r"),
        ("rtree-map /tmp/x.svg --page-bytes 512", "page"),
        ("rtree-map /tmp/x.svg --load bulk --insert-order rows", "an order of inserts: give --load insert"),
        ("rtree-map /tmp/x.svg --load insert --fill 0.5", "--fill is for a bulk load"),
        ("rtree-map /tmp/x.svg --insert-order rows --fill 0.5", "--fill is for a bulk load"),
        ("rtree-map", "FILE.svg"),
        ("rtree --rects 10", "from 1000 to 100M"),
        ("rtree --window 0", "0 is not in 1..=4096"),
    ] {
        let (ok, text) = run(line, None);
        assert!(!ok && text.contains(says), "{line}: {text}");
    }
}

#[cfg(feature = "peers")]
#[test]
fn local_r_trees_give_the_same_answers() {
    let (_, text) = run("rtree-local --json --entries 5000 --rounds 2 --loads 1", None);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (rows, checks) = lines.split_at(7 * 5 - 2);
    assert!(rows.iter().all(|row| number(row, "ops") > 0.0 && number(row, "times_rstar") > 0.0), "{rows:?}");
    assert!(rows.iter().filter(|row| row["name"] == "rstar").all(|row| number(row, "times_rstar") == 1.0), "{rows:?}");
    let (answers, speeds): (Vec<&Value>, Vec<&Value>) =
        checks.iter().partition(|check| check["name"].as_str().unwrap().starts_with("answers of "));
    // A load answers nothing, and a count may take as long as it does.
    assert_eq!((answers.len(), speeds.len()), (7 - 1, 7 - 2), "{checks:?}");
    assert!(answers.iter().all(|check| check["ok"] == true), "{answers:?}");
    let found = |name: &str| answers.iter().find(|check| check["name"] == name).map(|check| number(check, "found"));
    assert_eq!(found("answers of 5 nearest"), Some(2.0 * 500.0 * 5.0));
    for name in ["search, 1e-2", "count, 1e-2", "insert"] {
        assert!(found(&format!("answers of {name}")) > Some(0.0), "{answers:?}");
    }
    let searches = ["search, 1e-5", "count, 1e-5"].map(|name| found(&format!("answers of {name}")));
    assert!(searches.iter().all(Option::is_some), "{answers:?}");
}

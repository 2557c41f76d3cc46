//! What the guide's chapter on adding a structure says of the skip list is so: its code is the code, its counts of lines
//! are right, and the whole is as small as is claimed.

use std::{fs, path::Path};

/// Lines of a structure that is to show that little code suffices.
const LINES_MAX: usize = 400;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The files of the skip list, with their lines without comments and blank ones.
fn sources() -> Vec<(String, Vec<String>)> {
    let dir = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/skiplist")).unwrap();
    dir.map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let lines = read(&format!("src/skiplist/{name}"));
        let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        (name.clone(), lines.map(str::to_owned).collect())
    })
    .collect()
}

#[test]
fn the_counts_of_lines_are_right() {
    let chapter = read("../docs/src/adding-a-structure.md");
    let count_of = |what: &str| -> usize {
        let row = chapter.lines().find(|line| line.starts_with('|') && line.contains(what));
        let row = row.unwrap_or_else(|| panic!("no row for {what}"));
        row.trim_end_matches('|').rsplit('|').next().unwrap().trim().parse().unwrap()
    };
    let mut total = 0;
    for (name, lines) in sources() {
        assert_eq!(count_of(&format!("`{name}`")), lines.len(), "{name}");
        total += lines.len();
    }
    assert_eq!(count_of("together"), total);
    assert!(total <= LINES_MAX, "{total} lines");
}

#[test]
fn the_code_is_the_code() {
    let chapter = read("../docs/src/adding-a-structure.md");
    let sources = sources();
    let mut blocks = 0;
    for block in chapter.split("```rust,ignore\n").skip(1) {
        let quoted: Vec<&str> = block.split("```").next().unwrap().lines().map(str::trim).collect();
        let is_there = sources.iter().any(|(_, lines)| lines.windows(quoted.len()).any(|window| window == quoted));
        assert!(is_there, "the skip list has no such code:\n{}", quoted.join("\n"));
        blocks += 1;
    }
    assert!(blocks > 0);
}

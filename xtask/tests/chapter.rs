//! The guide's chapter on adding a structure quotes code that compiles: each of its blocks stands in the example.

use std::{fs, path::Path};

fn lines(path: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)).unwrap();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn the_chapter_quotes_the_example() {
    let (chapter, example) = (lines("docs/src/adding-a-structure.md"), lines("examples/counter-set/src/lib.rs"));
    let mut blocks = 0;
    for block in chapter.split(|line| line == "```rust,ignore").skip(1) {
        let quoted: Vec<&String> = block.iter().take_while(|line| *line != "```").collect();
        let is_there = example.windows(quoted.len()).any(|window| window.iter().eq(quoted.iter().copied()));
        assert!(is_there, "the example has no such code:\n{quoted:#?}");
        blocks += 1;
    }
    assert!(blocks >= 10, "{blocks} blocks");
}

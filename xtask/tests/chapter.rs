//! What the docs name is there: the chapter on adding a structure quotes the whole of code that compiles, and files are where they are
//! said to be.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn lines(path: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(path)).unwrap();
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn the_chapter_quotes_the_example() {
    let (chapter, example) = (lines("docs/src/adding-a-structure.md"), lines("examples/counter-set/src/lib.rs"));
    let mut quotes = vec![false; example.len()];
    let mut blocks = 0;
    for block in chapter.split(|line| line == "```rust,ignore").skip(1) {
        let quoted: Vec<&String> = block.iter().take_while(|line| *line != "```").collect();
        let at = example.windows(quoted.len()).position(|window| window.iter().eq(quoted.iter().copied()));
        let at = at.unwrap_or_else(|| panic!("the example has no such code:\n{quoted:#?}"));
        quotes[at..at + quoted.len()].fill(true);
        blocks += 1;
    }
    assert!(blocks >= 10, "{blocks} blocks");
    let is_code = |line: &str| !line.is_empty() && !line.starts_with("//");
    let left_out: Vec<_> = example.iter().zip(quotes).filter(|(line, is_quoted)| !is_quoted && is_code(line)).collect();
    assert!(left_out.is_empty(), "who follows the chapter lacks this code:\n{left_out:#?}");
}

/// Where the docs look for a file: tables and headings say which of these is meant.
const FOLDERS: [&str; 10] = [
    "",
    "docs/src",
    "examples/counter-set",
    "runtime/src",
    "runtime/fabric/src",
    "runtime/messaging/src",
    "cache/src",
    "offload/src",
    "structures/src",
    "structures/src/rtree",
];

#[test]
fn the_docs_name_files_that_are_there() {
    let mut pages: Vec<_> = fs::read_dir(root().join("docs/src")).unwrap().map(|page| page.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    pages.push(root().join("README.md"));
    let (mut found, mut missing) = (0, Vec::new());
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for name in text.split('`').skip(1).step_by(2) {
            let is_file = name.ends_with(".rs") || name.ends_with(".md") || name.ends_with(".toml");
            let is_made = name.starts_with("target/");
            let is_path = name.chars().all(|char| char.is_ascii_alphanumeric() || "/._-".contains(char));
            if is_made || !is_path || !(is_file || name.ends_with('/')) {
                continue;
            }
            match FOLDERS.iter().any(|folder| root().join(folder).join(name).exists()) {
                true => found += 1,
                false => missing.push(format!("{}: {name}", page.display())),
            }
        }
    }
    assert!(missing.is_empty(), "the docs name files that are not there: {missing:#?}");
    assert!(found >= 80, "{found} names");
}

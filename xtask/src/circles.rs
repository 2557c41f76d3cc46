//! Circles of modules: `cargo xtask circles`.
//!
//! Inside a crate, top-level modules depend on each other in one direction. What a module depends on is what its sources
//! name: paths that begin with `crate`, `super` or `self`, in `use` declarations, in code and in the arguments of macros.
//! A name that the crate's root re-exports counts as the module that it comes from. Tests and documentation do not count.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use proc_macro2::{Span, TokenStream, TokenTree};
use syn::{
    Attribute, Item, ItemMod, UseTree,
    visit::{self, Visit},
};

/// The root of a crate, as a node of its graph: what is defined there and not in a module.
const ROOT: &str = "(root)";

/// Where one module names another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: PathBuf,
    line: usize,
}

/// A crate's top-level modules, and for each the ones that it names, with one place for each.
#[derive(Debug, Default)]
struct Graph(BTreeMap<String, BTreeMap<String, Place>>);

/// Modules each of which depends on all the others, and the dependencies among them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Circle {
    modules: Vec<String>,
    edges: Vec<(String, String, Place)>,
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.modules.join(" <-> "))?;
        for (from, to, Place { file, line }) in &self.edges {
            writeln!(f, "  {from} -> {to}: {}:{line}", file.display())?;
        }
        Ok(())
    }
}

/// The circles of every crate of the workspace at `workspace`, by the file of the crate's root.
pub(crate) fn of_workspace(workspace: &Path) -> Result<Vec<(PathBuf, Circle)>> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["metadata", "--format-version", "1", "--no-deps"]).current_dir(workspace);
    let output = cargo.output().context("starting cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("reading cargo's metadata")?;
    let list = |value: &serde_json::Value| value.as_array().cloned().unwrap_or_default();
    let mut roots = BTreeSet::new();
    for target in list(&metadata["packages"]).iter().flat_map(|package| list(&package["targets"])) {
        let is_code = list(&target["kind"]).iter().any(|kind| kind == "lib" || kind == "bin");
        if let (true, Some(path)) = (is_code, target["src_path"].as_str()) {
            roots.insert(PathBuf::from(path));
        }
    }
    ensure!(!roots.is_empty(), "cargo knows no crates in {}", workspace.display());
    let mut found = Vec::new();
    for root in roots {
        let circles = of_crate(&root)?;
        found.extend(circles.into_iter().map(|circle| (root.clone(), circle)));
    }
    Ok(found)
}

/// The circles of the crate whose root is this file.
fn of_crate(root: &Path) -> Result<Vec<Circle>> {
    let file = parse(root)?;
    let mut reader = Reader { root: Root::of(&file.items), graph: Graph::default() };
    let dir = root.parent().context("a source file stands in a folder")?;
    reader.read(&file.items, &[], root, dir)?;
    Ok(reader.graph.circles())
}

fn parse(path: &Path) -> Result<syn::File> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    syn::parse_file(&text).with_context(|| format!("parsing {}", path.display()))
}

/// What names mean in the root of a crate.
#[derive(Debug, Default)]
struct Root {
    modules: BTreeSet<String>,
    /// Names that come from a module.
    imported: BTreeMap<String, String>,
    /// Names that come from another crate.
    foreign: BTreeSet<String>,
}

impl Root {
    fn of(items: &[Item]) -> Self {
        let mut root = Self::default();
        for item in items {
            if let Item::Mod(module) = item {
                root.modules.insert(module.ident.to_string());
            }
        }
        for item in items {
            let Item::Use(item) = item else { continue };
            for Leaf { path, name, .. } in leaves(&item.tree) {
                let path: Vec<&str> =
                    path.iter().map(String::as_str).skip_while(|&s| s == "self" || s == "crate").collect();
                match path.first() {
                    Some(&first) if root.modules.contains(first) => root.imported.insert(name, first.to_owned()),
                    _ => {
                        root.foreign.insert(name);
                        None
                    }
                };
            }
        }
        root
    }

    /// The node that a name of the root belongs to; none for one of another crate.
    fn node(&self, name: &str) -> Option<String> {
        if self.modules.contains(name) {
            Some(name.to_owned())
        } else if let Some(module) = self.imported.get(name) {
            Some(module.clone())
        } else {
            (!self.foreign.contains(name)).then(|| ROOT.to_owned())
        }
    }
}

struct Reader {
    root: Root,
    graph: Graph,
}

impl Reader {
    /// Reads the items of the module at `path`. `dir` is where the files of its modules are.
    fn read(&mut self, items: &[Item], path: &[String], file: &Path, dir: &Path) -> Result<()> {
        for item in items {
            match item {
                Item::Mod(module) if is_test(&module.attrs) => {}
                Item::Mod(module) => self.read_module(module, path, file, dir)?,
                // What a root exports is its modules', and depends on nothing itself.
                Item::Use(item) if path.is_empty() && !matches!(item.vis, syn::Visibility::Inherited) => {}
                item => Names { reader: self, path: path.to_vec(), file }.visit_item(item),
            }
        }
        Ok(())
    }

    fn read_module(&mut self, module: &ItemMod, path: &[String], file: &Path, dir: &Path) -> Result<()> {
        let name = module.ident.to_string();
        let inner: Vec<String> = path.iter().cloned().chain([name.clone()]).collect();
        let inner_dir = dir.join(&name);
        if let Some((_, items)) = &module.content {
            return self.read(items, &inner, file, &inner_dir);
        }
        let candidates = [dir.join(format!("{name}.rs")), inner_dir.join("mod.rs")];
        let Some(source) = candidates.iter().find(|candidate| candidate.exists()) else {
            // Made for another platform, or by a build script.
            return Ok(());
        };
        self.read(&parse(source)?.items, &inner, source, &inner_dir)
    }

    /// Notes that the module at `path` names this path.
    fn note(&mut self, path: &[String], named: &[String], file: &Path, span: Span) {
        let from = path.first().map_or(ROOT, String::as_str);
        let mut at: Vec<String> = path.to_vec();
        let mut named = named.iter();
        let mut next = named.next();
        match next.map(String::as_str) {
            Some("crate") => at.clear(),
            Some("super") => drop(at.pop()),
            Some("self") => {}
            // In a root, modules and what they export need no prefix.
            Some(name) if path.is_empty() && self.root.node(name).is_some_and(|node| node != ROOT) => {
                return self.add(from, name, file, span);
            }
            _ => return,
        }
        next = named.next();
        while next.is_some_and(|name| name == "super") {
            at.pop();
            next = named.next();
        }
        let target = at.first().or(next).cloned();
        match target {
            Some(name) if at.is_empty() => self.add(from, &name, file, span),
            _ => {}
        }
    }

    fn add(&mut self, from: &str, name: &str, file: &Path, span: Span) {
        let Some(to) = self.root.node(name).filter(|to| to != from) else { return };
        let place = Place { file: file.to_path_buf(), line: span.start().line };
        self.graph.0.entry(from.to_owned()).or_default().entry(to).or_insert(place);
    }
}

/// The paths that an item of one module names.
struct Names<'a> {
    reader: &'a mut Reader,
    path: Vec<String>,
    file: &'a Path,
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for Leaf { path, span, .. } in leaves(&item.tree) {
            self.reader.note(&self.path, &path, self.file, span);
        }
    }

    // A visibility says who may use an item, not what the item uses.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if let Some(first) = path.segments.first() {
            self.reader.note(&self.path, &names, self.file, first.ident.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.tokens(called.tokens.clone());
    }

    /// A module inside a function.
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        self.path.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.path.pop();
    }
}

impl Names<'_> {
    /// Finds paths in what is not parsed.
    fn tokens(&mut self, tokens: TokenStream) {
        let (mut names, mut colons, mut first): (Vec<String>, usize, Option<Span>) = (Vec::new(), 0, None);
        for token in tokens {
            match token {
                TokenTree::Ident(name) if names.is_empty() || colons == 2 => {
                    first.get_or_insert(name.span());
                    names.push(name.to_string());
                    colons = 0;
                    continue;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !names.is_empty() && colons < 2 => {
                    colons += 1;
                    continue;
                }
                _ => {}
            }
            if let Some(span) = first.take() {
                self.reader.note(&self.path, &names, self.file, span);
            }
            (names, colons) = (Vec::new(), 0);
            match token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(name) => {
                    first = Some(name.span());
                    names.push(name.to_string());
                }
                _ => {}
            }
        }
        if let Some(span) = first {
            self.reader.note(&self.path, &names, self.file, span);
        }
    }
}

/// One name that a `use` declaration brings in.
struct Leaf {
    path: Vec<String>,
    /// What it is called here.
    name: String,
    span: Span,
}

fn leaves(tree: &UseTree) -> Vec<Leaf> {
    fn walk(tree: &UseTree, before: &[String], leaves: &mut Vec<Leaf>) {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(path.ident.to_string()), leaves),
            UseTree::Group(group) => group.items.iter().for_each(|tree| walk(tree, before, leaves)),
            UseTree::Name(name) => {
                let span = name.ident.span();
                let (path, name) = match name.ident.to_string() {
                    // `a::{self}` brings in `a`.
                    this if this == "self" && !before.is_empty() => {
                        (before.to_vec(), before.last().cloned().unwrap_or_default())
                    }
                    name => (with(name.clone()), name),
                };
                leaves.push(Leaf { path, name, span });
            }
            UseTree::Rename(rename) => leaves.push(Leaf {
                path: with(rename.ident.to_string()),
                name: rename.rename.to_string(),
                span: rename.ident.span(),
            }),
            UseTree::Glob(glob) => {
                leaves.push(Leaf { path: before.to_vec(), name: "*".into(), span: glob.star_token.span })
            }
        }
    }
    let mut found = Vec::new();
    walk(tree, &[], &mut found);
    found
}

/// Whether an item is there for tests or documentation alone.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().filter_map(|attribute| attribute.meta.require_list().ok()).any(|list| {
        let condition = list.tokens.to_string();
        let is_alone = |name: &str| {
            condition == name
                || condition.starts_with(&format!("all ({name}"))
                || condition.starts_with(&format!("all({name}"))
        };
        list.path.is_ident("cfg") && (is_alone("test") || is_alone("doc"))
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl Graph {
    /// Everything that a module depends on, also by way of others.
    fn reachable<'a>(&'a self, from: &'a str) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        let mut open = vec![from];
        while let Some(module) = open.pop() {
            for to in self.0.get(module).into_iter().flat_map(BTreeMap::keys) {
                if found.insert(to.as_str()) {
                    open.push(to);
                }
            }
        }
        found
    }

    fn circles(&self) -> Vec<Circle> {
        let reachable: BTreeMap<&str, BTreeSet<&str>> =
            self.0.keys().map(|module| (module.as_str(), self.reachable(module))).collect();
        let is_reached = |from: &str, to: &str| reachable.get(from).is_some_and(|found| found.contains(to));
        let mut groups: BTreeSet<Vec<&str>> = BTreeSet::new();
        for &module in reachable.keys().filter(|module| is_reached(module, module)) {
            let both = |other: &&str| is_reached(module, other) && is_reached(other, module);
            groups.insert(reachable.keys().copied().filter(both).collect());
        }
        let circle = |group: Vec<&str>| {
            let inside =
                |from: &str| self.0.get(from).into_iter().flatten().filter(|(to, _)| group.contains(&to.as_str()));
            let edges = group
                .iter()
                .flat_map(|from| inside(from).map(|(to, place)| (String::from(*from), to.clone(), place.clone())));
            Circle { edges: edges.collect(), modules: group.iter().map(|&module| module.to_owned()).collect() }
        };
        groups.into_iter().map(circle).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The circles of a crate with these files, as sets of modules.
    fn circles(files: &[(&str, &str)]) -> Vec<Circle> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        of_crate(&dir.path().join("lib.rs")).unwrap()
    }

    fn modules(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        circles(files).into_iter().map(|circle| circle.modules).collect()
    }

    #[test]
    fn a_planted_circle_is_found_where_it_is() {
        let found = circles(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B;\npub struct A;"),
            ("b/mod.rs", "mod inner;\npub struct B;"),
            ("b/inner.rs", "\nfn f() { let _ = crate::c::C; }"),
            ("c.rs", "pub struct C;\nimpl C {\n    fn f(_: super::a::A) {}\n}"),
        ]);
        let [Circle { modules, edges }] = &found[..] else { panic!("{found:?}") };
        assert_eq!(modules, &["a", "b", "c"]);
        let places: Vec<_> = edges
            .iter()
            .map(|(from, to, place)| (from.as_str(), to.as_str(), place.file.file_name().unwrap(), place.line))
            .collect();
        assert_eq!(
            places,
            [("a", "b", "a.rs".as_ref(), 1), ("b", "c", "inner.rs".as_ref(), 2), ("c", "a", "c.rs".as_ref(), 3)]
        );
    }

    #[test]
    fn each_way_to_name_a_module_counts() {
        for (what, names_b) in [
            ("a group", "use crate::{b::{self, B}};"),
            ("a glob", "use crate::b::*;"),
            ("a re-export of the root", "use crate::B;"),
            ("a renamed re-export of the root", "use crate::Other;"),
            ("an expression", "fn f() { crate::b::f() }"),
            ("a macro's argument", "fn f() { assert!(matches!(x, super::b::B)) }"),
            ("a nested module", "mod inner { use super::super::b::B; }"),
        ] {
            let files = [
                ("lib.rs", "mod a; mod b; pub use self::b::{B, B as Other};"),
                ("a.rs", names_b),
                ("b.rs", "use super::a; pub struct B;"),
            ];
            assert_eq!(modules(&files), [["a", "b"]], "{what}");
        }
    }

    #[test]
    fn the_root_is_a_module_too() {
        let files = [("lib.rs", "mod a; use a::A; pub struct R(A);"), ("a.rs", "pub struct A; fn f(_: crate::R) {}")];
        assert_eq!(modules(&files), [[ROOT, "a"]]);
        let files = [("lib.rs", "mod a; pub use a::A; pub struct R;"), ("a.rs", "pub struct A; fn f(_: crate::R) {}")];
        assert!(modules(&files).is_empty(), "exports do not count");
    }

    #[test]
    fn what_is_no_dependency_does_not_count() {
        for (what, text) in [
            ("tests", "#[cfg(test)] mod tests { use crate::b::B; }"),
            ("tests off loom", "#[cfg(all(test, not(loom)))] mod tests { use crate::b::B; }"),
            ("a visibility", "mod inner { pub(in super::super) struct S; }"),
            ("documentation", "//! See [`crate::b`]."),
            ("documentation's imports", "#[cfg(doc)] use crate::b::B;"),
            ("another crate under a name of this one", "use crate::other::b;"),
            ("itself", "use self::inner::S; mod inner { use crate::a::T; }"),
        ] {
            let files = [
                ("lib.rs", "mod a; mod b; pub use elsewhere as other;"),
                ("a.rs", text),
                ("b.rs", "use crate::a; pub struct B;"),
            ];
            assert!(modules(&files).is_empty(), "{what}");
        }
    }
}

//! The catalog: which structures a cluster holds, by name.
//!
//! A fixed array of 128-byte pages on server 0, in the common page format and changed like any other page. Page 0 is the
//! head: it holds the next structure id, and every change of the catalog goes through it, so two structures cannot take
//! one name. The others are entries:
//!
//! ```text
//! word 4      number of the plug-in's name, 0 = no entry       (head: the next structure id)
//! word 5      structure id:32 | length of the name:16 | placement policy:8 | size class of the root:8
//! word 6      root page; null in an entry that is *unfinished*
//! word 7      link to the descriptor page; in an unfinished entry: the incarnation of whoever makes or drops the structure
//! word 8..16  name, zero-padded UTF-8
//! ```
//!
//! A structure has an entry before it has a page, and until its last page is free: an unfinished one, which keeps the name and
//! which nobody else finds. So when a compute server dies that was making a structure, filling it or dropping it, the others know
//! that its pages are nobody's, and free them (`free_unfinished`). What one that lives could not free, its maintenance frees.
//!
//! Each structure has a descriptor, a page of its own of 4 KiB:
//!
//! ```text
//! word 4      length of the plug-in's name
//! word 5..13  name of the plug-in, zero-padded UTF-8
//! word 13..21 options, as the plug-in understands them
//! word 32..   partition map: see `partition`
//! ```

mod unfinished;

use futures_util::future::join_all;

use self::unfinished::free_own;
pub(crate) use self::unfinished::{free_left, free_unfinished};
use crate::{
    access::{Access, Cause, Each, Interrupt, NewPage, Operations, PageRef, Pages, PagesMut, Plugin, Slot, Start},
    error::Error,
    layout::{CATALOG_CLASS, CATALOG_PAGES, catalog_page_at},
    lock::OwnerId,
    one_sided::{OneSided, OneSidedPages, PageCopy, Proof, ownership},
    operation::retry,
    page::{HEADER_WORDS, Identity, SizeClass, StructureId, seal},
    pages,
    ptr::{Link, RemotePtr},
    recovery,
    report::Report,
    structure::{OPTIONS, Overlap, Placement, PlacementPolicy, Structure, StructurePlacement},
    words::Words,
    worker::Handle,
};

const CATALOG_ID: StructureId = StructureId(0);
const CATALOG_KIND: u8 = 0xca;
const WORDS: usize = CATALOG_CLASS.words();
const KIND: usize = HEADER_WORDS;
const NUMBER: usize = 5;
const ROOT: usize = 6;
const DESCRIPTOR: usize = 7;
const NAME: usize = 8;
/// The longest name, in bytes: of a structure, and of a plug-in.
pub const NAME_BYTES_MAX: usize = (WORDS - NAME) * 8;
const NAME_WORDS: usize = NAME_BYTES_MAX / 8;

/// The size of a descriptor page.
pub const DESCRIPTOR_CLASS: SizeClass = match SizeClass::of_bytes(4096) {
    Some(class) => class,
    None => panic!("4 KiB is a size class"),
};
const DESCRIPTOR_KIND: u8 = 0xde;
const KIND_LENGTH: usize = HEADER_WORDS;
const KIND_NAME: usize = KIND_LENGTH + 1;
const OPTION: usize = KIND_NAME + NAME_WORDS;

/// The catalog's own pages, as those of a structure.
#[derive(Debug, Clone, Copy, Default)]
struct Catalog;

impl Plugin for Catalog {
    const NAME: &'static str = "catalog";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = CATALOG_CLASS.bytes()..=CATALOG_CLASS.bytes();
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn overlap(_page: &(impl Words + ?Sized), (): &()) -> Overlap {
        Overlap::Inside
    }

    fn create(_pages: &mut impl PagesMut, _root: Slot, _structure: &Structure) {}

    fn operations(_to: &mut impl Operations<Self>) {}

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

pub(crate) fn empty_page(index: usize) -> [u64; WORDS] {
    let mut page = [0; WORDS];
    if index == 0 {
        page[KIND] = 1;
    }
    let identity =
        Identity { structure: CATALOG_ID, level: 0, class: CATALOG_CLASS, kind: CATALOG_KIND, is_words: false };
    seal(&mut page, catalog_page_at(index), identity, 0);
    page
}

fn access(worker: &Handle) -> OneSided<Catalog> {
    let structure = Structure {
        id: CATALOG_ID,
        name: "catalog".into(),
        kind: Catalog::NAME.into(),
        class: CATALOG_CLASS,
        root: catalog_page_at(0),
        policy: PlacementPolicy::default(),
        descriptor: None,
        options: [0; OPTIONS],
    };
    OneSided::new(worker, structure, Proof::Checksum)
}

async fn read_each<A: Access>(
    access: &A,
    links: impl IntoIterator<Item = Link>,
) -> Result<Vec<A::Page<'_>>, Interrupt> {
    // One-sided access looks at the link alone.
    let root = std::rc::Rc::new(access.open(Start::Root).await?);
    let pages: Each<'_, A> = access.follow_each(links.into_iter().map(|link| (std::rc::Rc::clone(&root), link)));
    pages.all().await.into_iter().collect()
}

/// An entry of the catalog.
#[derive(Debug, Clone)]
enum Entry {
    Empty,
    Unfinished { id: StructureId, name: String, by: OwnerId },
    Whole(WholeEntry),
}

impl Entry {
    fn name(&self) -> Option<&str> {
        match self {
            Self::Empty => None,
            Self::Unfinished { name, .. } => Some(name),
            Self::Whole(entry) => Some(&entry.structure.name),
        }
    }

    fn id(&self) -> Option<StructureId> {
        match self {
            Self::Empty => None,
            Self::Unfinished { id, .. } => Some(*id),
            Self::Whole(entry) => Some(entry.structure.id),
        }
    }

    fn whole(self) -> Option<WholeEntry> {
        match self {
            Self::Whole(entry) => Some(entry),
            Self::Empty | Self::Unfinished { .. } => None,
        }
    }
}

/// That of a structure, which names a descriptor.
#[derive(Debug, Clone)]
struct WholeEntry {
    structure: Structure,
    kind: u64,
    descriptor: Link,
}

/// The head, and the entries that are not damaged.
struct Sound {
    head: PageCopy,
    entries: Vec<(PageCopy, Entry)>,
    /// What was wrong with another one.
    damage: Option<Error>,
}

/// As [`read_all`], where a damaged entry is to keep nobody from changing others.
async fn read_sound(access: &OneSided<Catalog>) -> Result<Sound, Interrupt> {
    // The head first, as in `read_all`.
    let mut sound = Sound { head: read_entry(access, 0).await?, entries: Vec::new(), damage: None };
    for page in join_all((1..CATALOG_PAGES).map(|index| read_entry(access, index))).await {
        let entry = match page {
            Ok(page) => page.read(|words| decode(words, page.at()))?.map(|entry| (page, entry)),
            Err(Interrupt::Failed(error)) if matches!(*error, Error::PageCorrupt { .. }) => Err(*error),
            Err(interrupt) => return Err(interrupt),
        };
        match entry {
            Ok(entry) => sound.entries.push(entry),
            Err(error) => {
                tracing::warn!(%error, "an entry of the catalog is damaged");
                sound.damage = Some(error);
            }
        }
    }
    Ok(sound)
}

async fn read_entry(access: &OneSided<Catalog>, index: usize) -> Result<PageCopy, Interrupt> {
    access.read_page(Link::to(catalog_page_at(index), CATALOG_CLASS)).await.map_err(never_stale)
}

/// Its pages are never freed, so another look would find the same.
fn never_stale(interrupt: Interrupt) -> Interrupt {
    match interrupt {
        Interrupt::Restart(Cause::Stale { page, .. }) => Error::PageCorrupt { page }.into(),
        interrupt => interrupt,
    }
}

/// The head and all entries.
async fn read_all(access: &OneSided<Catalog>) -> Result<Vec<PageCopy>, Interrupt> {
    let read = async {
        // The head first: a change that is locked from this copy of it has seen every name that is taken.
        let mut pages = vec![access.open(Start::Root).await?];
        let entries = (1..CATALOG_PAGES).map(|index| Link::to(catalog_page_at(index), CATALOG_CLASS));
        pages.extend(read_each(access, entries).await?);
        Ok(pages)
    };
    read.await.map_err(never_stale)
}

fn read_name(words: &(impl Words + ?Sized), first: usize, length: u64) -> Option<String> {
    let bytes: Vec<u8> = (first..first + NAME_WORDS).flat_map(|index| words.word(index).to_le_bytes()).collect();
    let bytes = bytes.get(..usize::try_from(length).ok()?)?;
    String::from_utf8(bytes.to_vec()).ok()
}

fn write_name(pages: &mut impl PagesMut, slot: Slot, first: usize, name: &str) {
    let mut bytes = [0; NAME_BYTES_MAX];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    for (index, bytes) in bytes.chunks_exact(8).enumerate() {
        pages.set(slot, first + index, u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    }
}

/// What an entry says.
fn decode(words: &[u64], at: RemotePtr) -> Result<Entry, Error> {
    let wrong = |why| Err(Error::Inconsistent { page: at, why });
    if words[KIND] == 0 {
        return Ok(Entry::Empty);
    }
    let number = words[NUMBER];
    let id = StructureId((number >> 32) as u32);
    let Some(name) = read_name(words, NAME, number >> 16 & 0xffff) else {
        return wrong("a catalog entry has no valid name");
    };
    if words[ROOT] == Link::NULL.word() {
        return match OwnerId::new(words[DESCRIPTOR]) {
            Some(by) => Ok(Entry::Unfinished { id, name, by }),
            None => wrong("an unfinished catalog entry does not say whose it is"),
        };
    }
    let Some(class) = SizeClass::from_index(number as u8) else {
        return wrong("a catalog entry has no valid page size");
    };
    let Some(policy) = PlacementPolicy::from_index((number >> 8) as u8) else {
        return wrong("a catalog entry does not say where its pages are");
    };
    let Some((root, _)) = Link::from_word(words[ROOT]).remote().filter(|&(_, of)| of == class) else {
        return wrong("a catalog entry has no valid root");
    };
    let descriptor = Link::from_word(words[DESCRIPTOR]);
    if descriptor.remote().is_none_or(|(_, class)| class != DESCRIPTOR_CLASS) {
        return wrong("a catalog entry has no valid descriptor");
    }
    let kind = String::new();
    let structure =
        Structure { id, name, kind, class, root, policy, descriptor: Some(descriptor), options: [0; OPTIONS] };
    Ok(Entry::Whole(WholeEntry { structure, kind: words[KIND], descriptor }))
}

fn entries(pages: &[PageCopy]) -> Result<Vec<(usize, Entry)>, Interrupt> {
    let entry = |(index, page): (usize, &PageCopy)| Ok((index, page.read(|words| decode(words, page.at()))??));
    pages.iter().enumerate().skip(1).map(entry).collect()
}

/// Adds what the descriptor says.
async fn described(worker: &Handle, entry: WholeEntry) -> Result<Structure, Interrupt> {
    let WholeEntry { mut structure, kind, descriptor } = entry;
    let of_structure = OneSided::<Catalog>::to_any(worker, structure.clone(), Proof::Checksum);
    let page = of_structure.read_page(descriptor).await?;
    let wrong = |why| Err(Error::Inconsistent { page: page.at(), why }.into());
    if page.kind() != DESCRIPTOR_KIND {
        return wrong("it is no descriptor of a structure");
    }
    let (name, options) = page.read(|words| {
        let options = std::array::from_fn(|index| words[OPTION + index]);
        (read_name(words, KIND_NAME, words[KIND_LENGTH]), options)
    })?;
    let Some(name) = name.filter(|name| crate::operation::hash_name(name, 0) == kind) else {
        return wrong("the name of the plug-in in the descriptor is not that of the catalog");
    };
    (structure.kind, structure.options) = (name, options);
    Ok(structure)
}

/// All structures of the cluster.
///
/// # Errors
/// If the catalog is damaged, or the fabric fails.
pub async fn list(worker: &Handle) -> Result<Vec<Structure>, Error> {
    let access = access(worker);
    retry(worker, async || {
        let mut all = Vec::new();
        for (_, entry) in entries(&read_all(&access).await?)? {
            if let Entry::Whole(entry) = entry {
                all.push(described(worker, entry).await?);
            }
        }
        Ok(all)
    })
    .await
}

/// The structure named `name`, whatever it is.
///
/// # Errors
/// If there is none, the catalog is damaged, or the fabric fails.
pub async fn find(worker: &Handle, name: &str) -> Result<Structure, Error> {
    let access = access(worker);
    retry(worker, async || {
        let all = entries(&read_all(&access).await?)?;
        let mut all: Vec<WholeEntry> = all.into_iter().filter_map(|(_, entry)| entry.whole()).collect();
        match all.iter().position(|entry| entry.structure.name == name) {
            Some(index) => described(worker, all.swap_remove(index)).await,
            None => {
                let known: Vec<&str> = all.iter().map(|entry| entry.structure.name.as_str()).collect();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(Error::NoSuchName { name: name.into(), known }.into())
            }
        }
    })
    .await
}

/// The structure named `name`, if it is one of this plug-in.
///
/// # Errors
/// If there is none, it is another plug-in's, the catalog is damaged, or the fabric fails.
pub async fn open<P: Plugin>(worker: &Handle, name: &str) -> Result<Structure, Error> {
    let found = find(worker, name).await?;
    if found.kind != P::NAME {
        return Err(Error::WrongKind { name: name.into(), found: found.kind, expected: P::NAME.into() });
    }
    match P::ROOT_BYTES.contains(&found.class.bytes()) {
        true => Ok(found),
        false => Err(Error::Inconsistent { page: found.root, why: "no structure of its kind has a root of that size" }),
    }
}

/// How a structure is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// The size of its root.
    pub class: SizeClass,
    /// Where its pages are.
    pub placement: StructurePlacement,
    /// What its plug-in wants to know whenever it is opened.
    pub options: [u64; OPTIONS],
}

/// Makes a structure with one page, its root, as [`Plugin::create`] says, and enters it into the catalog.
///
/// # Errors
/// If the name is taken, empty or too long, the size is none for its root, the catalog is full or damaged, memory is full, or
/// the fabric fails. Nothing is left behind then; what cannot be freed at once, maintenance frees.
pub async fn create<P: Plugin>(
    worker: &Handle,
    name: &str,
    options: &CreateOptions,
    proof: Proof,
) -> Result<OneSided<P>, Error> {
    create_with(worker, name, options, proof, async |_| Ok(())).await
}

/// [`create`], and then `build`, which adds pages to the structure before anybody else can open it. If that fails, all that it
/// has made is freed.
///
/// # Errors
/// As [`create`]; and what `build` fails with.
pub async fn create_with<P: Plugin>(
    worker: &Handle,
    name: &str,
    options: &CreateOptions,
    proof: Proof,
    build: impl AsyncFnOnce(&OneSided<P>) -> Result<(), Error> + 'static,
) -> Result<OneSided<P>, Error> {
    require_name(name, "name")?;
    require_name(P::NAME, "name of the plug-in")?;
    let &CreateOptions { class, placement, options } = options;
    if !P::ROOT_BYTES.contains(&class.bytes()) {
        let (least, most) = (P::ROOT_BYTES.start(), P::ROOT_BYTES.end());
        let why = format!("{}; a page of a {} has a power of two from {least} to {most} bytes", class.bytes(), P::NAME);
        return Err(Error::BadOption { option: "page-bytes", why });
    }
    let StructurePlacement { root, policy } = placement;
    let servers = worker.compute().geometry.len();
    if let Some(root) = root.filter(|root| root.index() >= servers) {
        let why = format!("memory server {}; there are {servers}, numbered from 0", root.index());
        return Err(Error::BadOption { option: "root", why });
    }
    let at = root.map_or(Placement::RoundRobin, Placement::Server);
    let (worker, name) = (worker.clone(), name.to_owned());
    // A task, so that nothing is left behind between the steps.
    let maker = worker.clone();
    let make = async move {
        let worker = &maker;
        let id = reserve(worker, &name, P::NAME).await?;
        let made = async {
            let root = pages::allocate(worker, class, at).await?;
            let descriptor = pages::allocate(worker, DESCRIPTOR_CLASS, Placement::With(root.at())).await?;
            let structure = Structure {
                id,
                name,
                kind: P::NAME.into(),
                class,
                root: root.at(),
                policy,
                descriptor: Some(descriptor.link()),
                options,
            };
            // Nobody else knows its pages yet.
            let access = OneSided::new(worker, structure, proof).unguarded();
            write_first_pages(&access, root, descriptor).await?;
            build(&access).await?;
            let structure = &access.context().structure;
            change_entry(worker, id, |pages, entry| write_entry(pages, entry, structure)).await?;
            Ok(access.guarded())
        };
        let made = made.await;
        if made.is_err()
            && let Err(error) = free_own(worker, id).await
        {
            tracing::warn!(%error, "what a structure has that was not made is freed later");
        }
        made
    };
    worker.spawn_to_end(make).await
}

async fn write_first_pages<P: Plugin>(access: &OneSided<P>, root: NewPage, descriptor: NewPage) -> Result<(), Error> {
    let mut pages = Pages::new();
    let (root, descriptor) = (pages.add_new(root), pages.add_new(descriptor));
    let structure = &access.context().structure;
    let written = access
        .change(pages, |pages| {
            P::create(pages, root, structure);
            pages.describe(descriptor, 0, DESCRIPTOR_KIND);
            pages.set(descriptor, KIND_LENGTH, P::NAME.len() as u64);
            write_name(pages, descriptor, KIND_NAME, P::NAME);
            pages.fill(descriptor, OPTION, &structure.options);
        })
        .await;
    written.map(drop).map_err(|interrupt| match interrupt {
        Interrupt::Failed(error) => *error,
        _ => Error::Malformed("an unconditional change was refused"),
    })
}

/// Takes the next structure id, and enters the name with it, unfinished.
pub(crate) async fn reserve(worker: &Handle, name: &str, kind: &str) -> Result<StructureId, Error> {
    let access = access(worker);
    let mut failure = None;
    loop {
        // Who is to be waited for, if a dead one was making or dropping what has the name.
        let reserved = retry(worker, async || {
            let mut pages = read_all(&access).await?;
            let entries = entries(&pages)?;
            match entries.iter().find(|(_, entry)| entry.name() == Some(name)) {
                Some((_, Entry::Unfinished { by, .. })) if worker.is_dead(*by) => return Ok(Err(*by)),
                Some(_) => return Err(Error::NameTaken { name: name.into() }.into()),
                None => {}
            }
            let Some(&(index, _)) = entries.iter().find(|(_, entry)| matches!(entry, Entry::Empty)) else {
                return Err(Error::CatalogFull { limit: CATALOG_PAGES - 1 }.into());
            };
            let head = &pages[0];
            let next = head.read(|words| words[KIND])?;
            let Ok(id) = u32::try_from(next) else {
                return Err(Error::Inconsistent { page: head.at(), why: "structure ids are used up" }.into());
            };
            let mut changed = Pages::new();
            let entry = changed.add(pages.swap_remove(index));
            let head = changed.add(pages.swap_remove(0));
            let write = |pages: &mut OneSidedPages| {
                pages.set(head, KIND, next + 1);
                pages.set(entry, KIND, crate::operation::hash_name(kind, 0));
                pages.set(entry, NUMBER, u64::from(id) << 32 | (name.len() as u64) << 16);
                write_name(pages, entry, NAME, name);
                leave_unfinished(pages, entry, worker.owner());
            };
            access.change(changed, write).await?;
            Ok(Ok(StructureId(id)))
        });
        match reserved.await? {
            Ok(id) => return Ok(id),
            Err(dead) => {
                if let Some(error) = failure.take() {
                    return Err(error);
                }
                match recovery::sweep(worker, free_unfinished).await {
                    // If it had left its slot.
                    Ok(_) => free_unfinished(worker, &[dead]).await.1?,
                    // It has left its slot, so what failed is about another one.
                    Err(_) if recovery::is_finished(worker, dead).await? => {
                        recovery::take_over(worker, dead).await?;
                        failure = free_unfinished(worker, &[dead]).await.1.err();
                    }
                    // It may be about another dead one, and the name be free.
                    Err(error) => failure = Some(error),
                }
            }
        }
    }
}

fn leave_unfinished(pages: &mut OneSidedPages, entry: Slot, by: OwnerId) {
    pages.set(entry, ROOT, Link::NULL.word());
    pages.set(entry, DESCRIPTOR, u64::from(by.incarnation()));
}

/// Changes the entry of a structure. Others may be damaged.
async fn change_entry(worker: &Handle, id: StructureId, f: impl Fn(&mut OneSidedPages, Slot)) -> Result<(), Error> {
    let access = access(worker);
    retry(worker, async || {
        let Sound { head, mut entries, damage } = read_sound(&access).await?;
        let Some(index) = entries.iter().position(|(_, entry)| entry.id() == Some(id)) else {
            let (name, known) = (format!("structure {}", id.0), String::from("it was removed"));
            // It may be the damaged one.
            return Err(damage.unwrap_or(Error::NoSuchName { name, known }).into());
        };
        let mut changed = Pages::new();
        let entry = changed.add(entries.swap_remove(index).0);
        changed.add(head);
        access.change(changed, |pages| f(pages, entry)).await.map(drop)
    })
    .await
}

/// Takes a structure out of the catalog and frees all its pages; how many. Nobody may use it any more: what others do to it
/// meanwhile fails, and pages that they add may stay behind.
///
/// # Errors
/// If there is no structure of that name, somebody owns it who lives ([`Error::Owned`]), somebody who lives has a page of it, or the
/// catalog, locked for long ([`Error::OwnerStalled`]), the catalog is damaged, or the fabric fails. If pages are left then, maintenance
/// frees them, and the name is taken until it has.
pub async fn destroy(worker: &Handle, name: &str) -> Result<u64, Error> {
    let structure = find(worker, name).await?;
    let user = ownership::SharedUser::default();
    let acting = user.act(worker, &structure).await?;
    let handle = worker.clone();
    let end = async move {
        let _acting = acting;
        let owner = handle.owner();
        change_entry(&handle, structure.id, |pages, entry| leave_unfinished(pages, entry, owner)).await?;
        // Its partition map goes with it.
        ownership::forget(&handle, &structure);
        free_own(&handle, structure.id).await
    };
    worker.spawn_to_end(end).await
}

fn require_name(name: &str, option: &'static str) -> Result<(), Error> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let why = format!("{name:?} has {} bytes; it has 1 to {NAME_BYTES_MAX}", name.len());
        return Err(Error::BadOption { option, why });
    }
    Ok(())
}

fn write_entry(pages: &mut impl PagesMut, slot: Slot, structure: &Structure) {
    pages.set(slot, KIND, crate::operation::hash_name(&structure.kind, 0));
    let number = u64::from(structure.id.0) << 32
        | (structure.name.len() as u64) << 16
        | u64::from(structure.policy.index()) << 8
        | structure.class.index() as u64;
    pages.set(slot, NUMBER, number);
    pages.set(slot, ROOT, structure.root_link().word());
    pages.set(slot, DESCRIPTOR, structure.descriptor.unwrap_or(Link::NULL).word());
    write_name(pages, slot, NAME, &structure.name);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn random_entries_decode_or_are_refused(mut words: [u64; WORDS], plausible: bool) {
            if plausible {
                words[KIND] |= 1;
                words[NUMBER] &= !0xffff_00ff | 7 | 0x3f << 16;
                words[ROOT] &= !(1 << 63 | 63);
                words[ROOT] |= words[NUMBER] & 7;
                words[DESCRIPTOR] &= !(1 << 63 | 63);
                words[DESCRIPTOR] |= DESCRIPTOR_CLASS.index() as u64;
            }
            let _ = decode(&words, catalog_page_at(1));
        }
    }
}

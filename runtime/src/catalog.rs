//! The catalog: which structures a cluster holds, by name.
//!
//! A fixed array of 128-byte pages on server 0, in the common page format and changed like any other page. Page 0 is the
//! head: it holds the next structure id, and every change of the catalog goes through it, so two structures cannot take
//! one name. The others are entries:
//!
//! ```text
//! word 4      kind of the structure, 0 = no entry       (head: the next structure id)
//! word 5      structure id:32 | 0:16 | spread:8 | size class:8
//! word 6      root page
//! word 7      length of the name
//! word 8..16  name, zero-padded UTF-8
//! ```

use crate::{
    access::{Access, Interrupt, PageRef, Start, Views, free},
    error::Error,
    layout::{CATALOG_CLASS, CATALOG_PAGES, catalog_page_at},
    one_sided::{OneSided, OneSidedViews, PageCopy, Proof},
    operation::retry,
    page::{Identity, SizeClass, StructureId, seal},
    pages::{self, Placement},
    ptr::RemotePtr,
    structure::{Placed, Spread, Structure},
    worker::Handle,
};

const CATALOG_ID: StructureId = StructureId(0);
const CATALOG_KIND: u8 = 0xca;
const WORDS: usize = CATALOG_CLASS.words();
const KIND: usize = 4;
const NUMBER: usize = 5;
const ROOT: usize = 6;
const NAME_LENGTH: usize = 7;
const NAME: usize = 8;
/// The longest name, in bytes.
pub const NAME_BYTES_MAX: usize = (WORDS - NAME) * 8;

pub(crate) fn empty_page(index: usize) -> [u64; WORDS] {
    let mut page = [0; WORDS];
    if index == 0 {
        page[KIND] = 1;
    }
    let identity = Identity { structure: CATALOG_ID, level: 0, class: CATALOG_CLASS, kind: CATALOG_KIND };
    seal(&mut page, catalog_page_at(index), identity, 0);
    page
}

fn access(worker: &Handle) -> OneSided {
    let structure = Structure {
        id: CATALOG_ID,
        name: "catalog".into(),
        kind: 0,
        class: CATALOG_CLASS,
        root: catalog_page_at(0),
        spread: Spread::default(),
    };
    OneSided::new(worker, structure, Proof::Checksum)
}

async fn read_all(access: &OneSided) -> Result<Vec<PageCopy>, Interrupt> {
    // The head first: a change that is locked from this copy of it has seen every entry as it is.
    let mut pages = vec![access.enter(Start::Root).await?];
    let entries: Vec<RemotePtr> = (1..CATALOG_PAGES).map(catalog_page_at).collect();
    for entry in access.read_pages(&entries, CATALOG_CLASS).await {
        pages.push(entry?);
    }
    Ok(pages)
}

/// The structure that an entry describes; `None` for an empty one.
fn decode(words: &[u64], at: RemotePtr) -> Result<Option<Structure>, Error> {
    let wrong = |why| Err(Error::Inconsistent { page: at, why });
    if words[KIND] == 0 {
        return Ok(None);
    }
    let Ok(kind) = u32::try_from(words[KIND]) else { return wrong("a catalog entry has no valid kind") };
    let Some(class) = SizeClass::from_index(words[NUMBER] as u8) else {
        return wrong("a catalog entry has no valid page size");
    };
    let Some(spread) = Spread::from_index((words[NUMBER] >> 8) as u8) else {
        return wrong("a catalog entry does not say where its pages are");
    };
    let Ok(root) = RemotePtr::from_raw(words[ROOT]) else { return wrong("a catalog entry has no valid root") };
    let bytes: Vec<u8> = words[NAME..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = usize::try_from(words[NAME_LENGTH]).ok().and_then(|length| bytes.get(..length));
    let Some(name) = name.and_then(|name| std::str::from_utf8(name).ok()) else {
        return wrong("a catalog entry has no valid name");
    };
    let id = StructureId((words[NUMBER] >> 32) as u32);
    Ok(Some(Structure { id, name: name.to_owned(), kind, class, root, spread }))
}

fn structures(pages: &[PageCopy]) -> Result<Vec<(usize, Option<Structure>)>, Interrupt> {
    let entry = |(index, page): (usize, &PageCopy)| Ok((index, page.read(|words| decode(words, page.at()))??));
    pages.iter().enumerate().skip(1).map(entry).collect()
}

/// All structures of the cluster.
///
/// # Errors
/// If the catalog is damaged, or the fabric fails.
pub async fn list(worker: &Handle) -> Result<Vec<Structure>, Error> {
    let access = access(worker);
    let all = retry(worker, async || structures(&read_all(&access).await?)).await?;
    Ok(all.into_iter().filter_map(|(_, structure)| structure).collect())
}

/// The structure named `name`, if it is of this kind.
///
/// # Errors
/// If there is none, it is of another kind, the catalog is damaged, or the fabric fails.
pub async fn open(worker: &Handle, name: &str, kind: u32) -> Result<Structure, Error> {
    let all = list(worker).await?;
    match all.iter().find(|structure| structure.name == name) {
        Some(found) if found.kind == kind => Ok(found.clone()),
        Some(found) => Err(Error::WrongKind { name: name.into(), found: found.kind, expected: kind }),
        None => {
            let known: Vec<&str> = all.iter().map(|structure| structure.name.as_str()).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            Err(Error::NoSuchName { name: name.into(), known })
        }
    }
}

/// Makes a structure with one page, its root, whose contents `empty` sets, and enters it into the catalog.
///
/// # Errors
/// As [`register`]; and if memory is full. Nothing is left behind then.
pub async fn create(
    worker: &Handle,
    name: &str,
    kind: u32,
    class: SizeClass,
    proof: Proof,
    placed: Placed,
    empty: impl FnOnce(&mut OneSidedViews) + 'static,
) -> Result<OneSided, Error> {
    let id = next_id(worker).await?;
    let at = placed.root.map_or(Placement::RoundRobin, Placement::Server);
    let root = pages::allocate(worker, class, at).await?;
    let structure = Structure { id, name: name.into(), kind, class, root: root.at(), spread: placed.spread };
    let access = OneSided::new(worker, structure, proof);
    // A task, so that the root is not left behind between the two steps.
    let make = async move {
        access.change(vec![], vec![root], empty).await.map_err(|interrupt| match interrupt {
            Interrupt::Failed(error) => *error,
            _ => Error::Malformed("an unconditional change was refused"),
        })?;
        let (worker, structure) = (access.worker(), access.structure());
        if let Err(error) = register(worker, structure).await {
            retry(worker, async || free(&access, structure.root).await).await?;
            return Err(error);
        }
        Ok(access)
    };
    worker.spawn_to_end(make).await
}

/// Reserves the next structure id. An id that is never registered is lost, which does no harm.
///
/// # Errors
/// If the catalog is damaged, or the fabric fails.
pub async fn next_id(worker: &Handle) -> Result<StructureId, Error> {
    let access = access(worker);
    retry(worker, async || {
        let head = access.enter(Start::Root).await?;
        let next = head.read(|words| words[KIND])?;
        let Ok(id) = u32::try_from(next) else {
            return Err(Error::Inconsistent { page: head.at(), why: "structure ids are used up" }.into());
        };
        access.change(vec![head], vec![], |views| views.set(0, KIND, next + 1)).await?;
        Ok(StructureId(id))
    })
    .await
}

/// Enters a structure, whose root is complete, into the catalog.
///
/// # Errors
/// If the name is taken, empty or too long, the catalog is full or damaged, or the fabric fails.
pub async fn register(worker: &Handle, structure: &Structure) -> Result<(), Error> {
    require_name(&structure.name)?;
    if structure.kind == 0 {
        return Err(Error::BadOption { option: "kind", why: "0 stands for no structure".into() });
    }
    let access = access(worker);
    retry(worker, async || {
        let mut pages = read_all(&access).await?;
        let entries = structures(&pages)?;
        if entries.iter().any(|(_, entry)| entry.as_ref().is_some_and(|entry| entry.name == structure.name)) {
            return Err(Error::NameTaken { name: structure.name.clone() }.into());
        }
        let Some(&(index, _)) = entries.iter().find(|(_, entry)| entry.is_none()) else {
            return Err(Error::CatalogFull { limit: CATALOG_PAGES - 1 }.into());
        };
        let entry = pages.swap_remove(index);
        let head = pages.swap_remove(0);
        access.change(vec![head, entry], vec![], |views| write_entry(views, 1, structure)).await
    })
    .await
}

/// Takes a structure out of the catalog. Its pages are the caller's to free.
///
/// # Errors
/// If it is not there, the catalog is damaged, or the fabric fails.
pub async fn unregister(worker: &Handle, structure: &Structure) -> Result<(), Error> {
    let access = access(worker);
    retry(worker, async || {
        let mut pages = read_all(&access).await?;
        let entries = structures(&pages)?;
        let is_it = |entry: &Structure| entry.id == structure.id;
        let Some(&(index, _)) = entries.iter().find(|(_, entry)| entry.as_ref().is_some_and(is_it)) else {
            let (name, known) = (structure.name.clone(), String::from("it was removed"));
            return Err(Error::NoSuchName { name, known }.into());
        };
        let entry = pages.swap_remove(index);
        let head = pages.swap_remove(0);
        access.change(vec![head, entry], vec![], |views| views.set(1, KIND, 0)).await
    })
    .await
}

fn require_name(name: &str) -> Result<(), Error> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let why = format!("{name:?} has {} bytes; a structure's name has 1 to {NAME_BYTES_MAX}", name.len());
        return Err(Error::BadOption { option: "name", why });
    }
    Ok(())
}

fn write_entry(views: &mut impl Views, page: usize, structure: &Structure) {
    views.set(page, KIND, u64::from(structure.kind));
    views.set(
        page,
        NUMBER,
        u64::from(structure.id.0) << 32 | u64::from(structure.spread.index()) << 8 | structure.class.index() as u64,
    );
    views.set(page, ROOT, structure.root.raw());
    views.set(page, NAME_LENGTH, structure.name.len() as u64);
    let mut name = [0; NAME_BYTES_MAX];
    name[..structure.name.len()].copy_from_slice(structure.name.as_bytes());
    for (index, bytes) in name.chunks_exact(8).enumerate() {
        views.set(page, NAME + index, u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn random_entries_decode_or_are_refused(mut words: [u64; WORDS], plausible: bool) {
            if plausible {
                words[KIND] &= 0xffff;
                words[NUMBER] &= !0xff | 7;
                words[ROOT] &= !(1 << 63);
                words[NAME_LENGTH] &= 0x7f;
            }
            let _ = decode(&words, catalog_page_at(1));
        }
    }
}

//! Pages of a Bw-tree that are nobody's: what a process leaves that dies between two swaps, or before it has freed what it has unlinked.
//!
//! A record is the tree's if the page to which its keys belong has it in its chain. Beside those there are numbers that nothing leads to,
//! with a chain of their own: the right half of a split whose left half never came to be; the child that the root has absorbed. Such a
//! number is given up, and the records of its chain are nobody's.
//!
//! A record that is not whole says of no page that it belongs there. Most likely it was being written when its maker died, and nothing leads
//! there yet. But a damaged record of the tree shall stay, to be found: so all chains are gone through.

use farlink_runtime::{access::*, error::Error, page::HEADER_WORDS};

use super::{
    Bw,
    chain::Record,
    page::{Found, Search, View, descend, find},
    record::{About, Change, MapWord, Mapped, Pid},
    split::unmap,
    table,
};

/// Words read in one round trip.
const AT_ONCE: usize = 64;

/// A key of the page that a record is of; none of a removal.
fn key_of(record: &Record) -> Option<u64> {
    match record {
        Record::Base(base) => Some(base.fences.low),
        Record::Delta(delta) => match delta.changes[0] {
            Change::Put { key, .. } | Change::Delete { key } => Some(key),
            Change::Merge { at, .. } | Change::Merging { at, .. } => Some(at),
            Change::Remove => None,
        },
    }
}

/// See [`Plugin::is_leaked`].
pub(super) async fn is_leaked<A: Access<Plugin = Bw>>(access: &A, link: Link) -> Result<bool, Interrupt> {
    let page = match access.open(Start::Page(link)).await {
        Err(Interrupt::Failed(error)) if is_of(&error, link) => return Ok(!is_met(access, link).await?),
        page => page?,
    };
    if page.kind() == table::TABLE_KIND {
        return Ok(!table::pages(access).await?.contains(&link));
    }
    let (at, record) = (page.at(), page.read(Record::of)?);
    let Some(record) = record else { return Ok(false) };
    let About { pid, level, .. } = record.about();
    let holds = |page: &View| page.records.iter().any(|record| record.at() == at);
    if let Some(key) = key_of(&record)
        && holds(&descend(access, key, level, Search::TO_CHANGE).await?)
    {
        return Ok(false);
    }
    let give_up = async |word: (WordPtr, MapWord), head: Option<Unlinked>, low| {
        let is_done = unmap(access, pid, word, Vec::from_iter(head), [u64::from(level), low]).await?;
        if is_done { Ok(true) } else { Err(Interrupt::again()) }
    };
    match find(access, pid).await? {
        Found::Page(page) if pid != Pid::ROOT && holds(&page) => {
            give_up((page.at, page.word), None, page.state.fences.low).await
        }
        Found::Removed(removed) => {
            let (number, head) = ((removed.at, removed.word), removed.head);
            let is_head = head.at() == at;
            let low = match removed.content(access).await {
                Ok(content) if is_head || holds(&content) => content.state.fences.low,
                Ok(_) => return Ok(true),
                // What was below the removal has been absorbed, and is free.
                Err(Interrupt::Restart(_)) if is_head => return give_up(number, None, 0).await,
                Err(Interrupt::Restart(_)) => return Ok(true),
                Err(failed) => return Err(failed),
            };
            // On the way a merge that is under way is finished: what is removed still, nobody absorbs.
            descend(access, low, level, Search::TO_CHANGE).await?;
            // Who else was to give it up does not free its newest record then.
            give_up(number, Some(head).filter(|_| !is_head), low).await
        }
        Found::Page(_) | Found::Gone => Ok(true),
    }
}

/// Whether the error is about this page's content.
fn is_of(error: &Error, link: Link) -> bool {
    matches!(*error, Error::PageCorrupt { page, .. } if link.remote().is_some_and(|(at, _)| at == page))
}

/// Whether who reads all chains comes to a page that is not whole. Nobody can make a new base of such a chain, so it stays where it is.
async fn is_met<A: Access<Plugin = Bw>>(access: &A, link: Link) -> Result<bool, Interrupt> {
    let mut numbers = vec![table::word_of(access, Pid::ROOT).await?];
    for page in table::pages(access).await? {
        let words = page.remote().map_or(0, |(_, class)| class.words());
        numbers.extend((HEADER_WORDS..words).map(|index| WordPtr { page, index }));
    }
    for numbers in numbers.chunks(AT_ONCE) {
        for word in access.load(numbers).await?.into_iter().map(MapWord) {
            let Some(Mapped::To(head)) = word.target() else { continue };
            let chain = async {
                let head = access.open(Start::Page(head)).await?;
                let Some(record) = head.read(Record::of)? else { return Ok(()) };
                match find(access, record.about().pid).await? {
                    Found::Removed(removed) => removed.content(access).await.map(drop),
                    Found::Page(_) | Found::Gone => Ok(()),
                }
            };
            match chain.await {
                Err(Interrupt::Failed(error)) if is_of(&error, link) => return Ok(true),
                Err(Interrupt::Failed(error)) => return Err(error.into()),
                // It has changed meanwhile, or is damaged otherwise.
                Ok(()) | Err(_) => {}
            }
        }
    }
    Ok(false)
}

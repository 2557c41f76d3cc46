//! Point operations.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Pages, PagesMut, Slot, Start, Words},
    page::{IDENTITY, Identity},
};

use super::{
    Tree,
    descend::{Descent, Ships, descend, try_descend},
    node::{KIND, Node, NodeMut, Side},
    shrink, split,
};
use crate::map::ops::{Put, PutMode};

pub(super) async fn get<A: Access<Plugin = Tree>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
    let Descent { page, upto, .. } = descend::<_, Ships>(access, from, key, 0).await?;
    page.read(|words| value_at(&Node(words), upto, key))
}

/// [`get`] from the root, if all pages on the way are at hand.
#[inline(always)]
pub(super) fn try_get<A: Access<Plugin = Tree>>(access: &A, key: u64) -> Result<Option<u64>, Start> {
    let Descent { page, upto, .. } = try_descend(access, key, 0)?;
    page.read(|words| value_at(&Node(words), upto, key)).map_err(|_| Start::Root)
}

/// The value of `key` in a leaf with so many keys up to it.
#[inline(always)]
fn value_at(leaf: &Node<'_, impl Words + ?Sized>, upto: usize, key: u64) -> Option<u64> {
    let index = upto.checked_sub(1)?;
    (leaf.key(index) == key).then(|| leaf.value(index))
}

pub(super) async fn put<A: Access<Plugin = Tree>>(
    access: &A,
    from: Start,
    put: &Put<Tree>,
) -> Result<Option<u64>, Interrupt> {
    let descent = descend::<_, Ships>(access, from, put.key, 0).await?;
    let step = descent.page.read(|words| put.step(&Node(words)))?;
    match step {
        Step::Nothing(before) => Ok(before),
        Step::Split => {
            split::split(access, descent, put.key, Some(put.value)).await?;
            Ok(None)
        }
        Step::Replace(..) | Step::Add(_) => {
            let (put, _) = access.change(Pages::current(descent.page), |pages| put.apply(pages)).await?;
            put.ok_or(Interrupt::conflict())
        }
    }
}

/// What a put has to do in its leaf.
enum Step {
    Nothing(Option<u64>),
    Replace(usize, u64),
    Add(usize),
    Split,
}

impl Put<Tree> {
    fn step(&self, leaf: &Node<'_, impl Words + ?Sized>) -> Step {
        match (leaf.search(self.key), self.mode) {
            (Ok(index), PutMode::Insert) => Step::Nothing(Some(leaf.value(index))),
            (Ok(index), PutMode::Update | PutMode::Upsert) => Step::Replace(index, leaf.value(index)),
            (Err(_), PutMode::Update) => Step::Nothing(None),
            (Err(index), _) if leaf.count() < leaf.capacity() => Step::Add(index),
            (Err(_), _) => Step::Split,
        }
    }

    /// Puts the entry into the leaf as it is now; `None` if it does not belong there any more, or finds no room.
    fn apply(&self, pages: &mut impl PagesMut) -> Option<Option<u64>> {
        let step = self.step(&leaf_for(&pages.page(Slot::ONLY), self.key)?);
        let mut leaf = NodeMut::new(pages, Slot::ONLY);
        match step {
            Step::Nothing(before) => Some(before),
            Step::Replace(index, before) => {
                leaf.set_value(index, self.value);
                Some(Some(before))
            }
            Step::Add(index) => {
                leaf.insert_at(index, (self.key, self.value));
                Some(None)
            }
            Step::Split => None,
        }
    }
}

/// The one page of a change, if it is a leaf, and the one for `key`.
fn leaf_for<W: Words>(words: &W, key: u64) -> Option<Node<'_, W>> {
    let identity = Identity::from_word(words.word(IDENTITY));
    let is_leaf = identity.is_some_and(|identity| identity.level == 0 && identity.kind == KIND);
    (is_leaf && Node(words).side(key) == Side::Here).then_some(Node(words))
}

pub(super) async fn remove<A: Access<Plugin = Tree>>(
    access: &A,
    from: Start,
    key: u64,
) -> Result<Option<u64>, Interrupt> {
    let Descent { page: leaf, .. } = descend::<_, Ships>(access, from, key, 0).await?;
    let (found, left, capacity) = leaf.read(|words| {
        let node = Node(words);
        (node.search(key).ok(), node.count().saturating_sub(1), node.capacity())
    })?;
    if found.is_none() {
        return Ok(None);
    }
    let leaves_little = left < shrink::least_count(capacity);
    if leaves_little && matches!(from, Start::Page(_)) && leaf.at() != access.context().structure.root {
        return Err(Interrupt::above());
    }
    let remove = |pages: &mut A::PagesMut<'_>| {
        let found = leaf_for(&pages.page(Slot::ONLY), key)?.search(key);
        Some(found.ok().map(|index| {
            let value = Node(&pages.page(Slot::ONLY)).value(index);
            NodeMut::new(pages, Slot::ONLY).remove_at(index);
            value
        }))
    };
    let (removed, _) = access.change(Pages::current(leaf), remove).await?;
    let Some(value) = removed.ok_or(Interrupt::conflict())? else { return Ok(None) };
    // The key is gone: from here on nothing may restart the operation.
    if leaves_little {
        shrink::clean_up(access, key).await;
    }
    Ok(Some(value))
}

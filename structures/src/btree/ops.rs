//! Point operations.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    page::{IDENTITY, Identity},
    words::Words,
};

use super::{
    Tree,
    descend::{Descent, descend, descend_at_once},
    node::{KIND, Node, NodeMut, Side, ViewWords},
    shrink, split,
};
use crate::map::ops::{Put, PutMode};

pub(super) async fn get<A: Access>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
    let Descent { page, upto, .. } = descend(access, from, key, 0).await?;
    page.read(|words| value_at(&Node(words), upto, key))
}

/// [`get`] from the root, if all pages on the way are at hand.
#[inline(always)]
pub(super) fn get_at_once<A: Access>(access: &A, key: u64) -> Result<Option<u64>, Start> {
    let Descent { page, upto, .. } = descend_at_once(access, key, 0)?;
    page.read(|words| value_at(&Node(words), upto, key)).map_err(|_| Start::Root)
}

/// The value of `key` in a leaf with so many keys up to it.
#[inline(always)]
fn value_at(leaf: &Node<'_, impl Words + ?Sized>, upto: usize, key: u64) -> Option<u64> {
    let index = upto.checked_sub(1)?;
    (leaf.key(index) == key).then(|| leaf.value(index))
}

pub(super) async fn put<A: Access>(access: &A, from: Start, put: &Put<Tree>) -> Result<Option<u64>, Interrupt> {
    let descent = descend(access, from, put.key, 0).await?;
    let step = descent.page.read(|words| put.step(&Node(words)))?;
    match step {
        Step::Nothing(before) => Ok(before),
        Step::Split => {
            split::split(access, descent, put.key, Some(put.value)).await?;
            Ok(None)
        }
        Step::Replace(..) | Step::Add(_) => {
            let altered = access.alter(descent.page, |views| put.apply(views)).await?;
            altered.ok_or(Interrupt::conflict())
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
    fn apply(&self, views: &mut impl Views) -> Option<Option<u64>> {
        let step = still_holds(views, self.key).then(|| self.step(&Node(&ViewWords(&*views, 0))))?;
        let mut leaf = NodeMut::new(views, 0);
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

/// Whether the one page of a change is a leaf, and the one for `key`.
fn still_holds(views: &impl Views, key: u64) -> bool {
    let identity = Identity::from_word(views.word(0, IDENTITY));
    let is_leaf = identity.is_some_and(|identity| identity.level == 0 && identity.kind == KIND);
    is_leaf && Node(&ViewWords(views, 0)).side(key) == Side::Here
}

pub(super) async fn remove<A: Access>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
    let leaf = descend(access, from, key, 0).await?.page;
    let (found, left, capacity) = leaf.read(|words| {
        let node = Node(words);
        (node.search(key).ok(), node.count().saturating_sub(1), node.capacity())
    })?;
    if found.is_none() {
        return Ok(None);
    }
    if left < shrink::least_count(capacity) {
        access.restructures()?;
    }
    let remove = |views: &mut A::Views<'_>| {
        if !still_holds(views, key) {
            return None;
        }
        let found = Node(&ViewWords(&*views, 0)).search(key);
        Some(found.ok().map(|index| {
            let value = Node(&ViewWords(&*views, 0)).value(index);
            NodeMut::new(views, 0).remove_at(index);
            value
        }))
    };
    let Some(value) = access.alter(leaf, remove).await?.ok_or(Interrupt::conflict())? else { return Ok(None) };
    // The key is gone: from here on nothing may restart the operation.
    if left < shrink::least_count(capacity) {
        shrink::tidy(access, key).await;
    }
    Ok(Some(value))
}

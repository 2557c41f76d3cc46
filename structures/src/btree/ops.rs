//! Point operations, as values.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    error::Error,
    operation::Operation,
    page::{IDENTITY, Identity},
    wire::Wire,
    words::Words,
};

use super::{
    descend::descend,
    node::{KIND, Node, NodeMut, Side, ViewWords},
    shrink, split,
};

/// Looks a key up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Get {
    /// The key.
    pub key: u64,
}

impl Operation for Get {
    /// Its value.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        let leaf = descend(access, from, self.key, 0).await?.page;
        let Ok(index) = leaf.read(|words| Node(words).search(self.key))? else { return Ok(None) };
        access.expect(&leaf, leaf.read(|words| Node(words).value_position(index))?).await;
        Ok(Some(leaf.read(|words| Node(words).value(index))?))
    }
}

/// What a [`Put`] does, depending on whether the key is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Only if it is absent.
    Insert,
    /// Only if it is there.
    Update,
    /// In either case.
    Upsert,
}

/// Stores a value under a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put {
    /// The key.
    pub key: u64,
    /// The value.
    pub value: u64,
    /// Whether the key must be absent or there.
    pub mode: PutMode,
}

impl Operation for Put {
    /// The value before: what an update replaced, or what an insert found and left.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        let descent = descend(access, from, self.key, 0).await?;
        let step = descent.page.read(|words| self.step(&Node(words)))?;
        match step {
            Step::Nothing(before) => Ok(before),
            Step::Split => {
                split::split(access, descent, self.key, Some(self.value)).await?;
                Ok(None)
            }
            Step::Replace(..) | Step::Add(_) => {
                let altered = access.alter(descent.page, |views| self.put(views)).await?;
                altered.ok_or(Interrupt::conflict())
            }
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

impl Put {
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
    fn put(&self, views: &mut impl Views) -> Option<Option<u64>> {
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

/// Removes a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remove {
    /// The key.
    pub key: u64,
}

impl Operation for Remove {
    /// The value that was removed.
    type Output = Option<u64>;

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Option<u64>, Interrupt> {
        let leaf = descend(access, from, self.key, 0).await?.page;
        let (found, left, capacity) = leaf.read(|words| {
            let node = Node(words);
            (node.search(self.key).ok(), node.count().saturating_sub(1), node.capacity())
        })?;
        if found.is_none() {
            return Ok(None);
        }
        let remove = |views: &mut A::Views<'_>| {
            if !still_holds(views, self.key) {
                return None;
            }
            let found = Node(&ViewWords(&*views, 0)).search(self.key);
            Some(found.ok().map(|index| {
                let value = Node(&ViewWords(&*views, 0)).value(index);
                NodeMut::new(views, 0).remove_at(index);
                value
            }))
        };
        let Some(value) = access.alter(leaf, remove).await?.ok_or(Interrupt::conflict())? else { return Ok(None) };
        // The key is gone: from here on nothing may restart the operation.
        if left < shrink::least_count(capacity) {
            shrink::tidy(access, self.key).await;
        }
        Ok(Some(value))
    }
}

impl Wire for Get {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        Ok(Self { key: u64::decode(from)? })
    }
}

impl Wire for Remove {
    fn encode(&self, to: &mut Vec<u64>) {
        self.key.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        Ok(Self { key: u64::decode(from)? })
    }
}

impl Wire for Put {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.key, self.value, self.mode as u64]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, Error> {
        let (key, value) = <(u64, u64)>::decode(from)?;
        let mode = match u64::decode(from)? {
            0 => PutMode::Insert,
            1 => PutMode::Update,
            2 => PutMode::Upsert,
            _ => return Err(Error::Malformed("a put has no such mode")),
        };
        Ok(Self { key, value, mode })
    }
}

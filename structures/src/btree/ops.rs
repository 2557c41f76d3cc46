//! Point operations, as values.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    error::Error,
    operation::Operation,
    wire::Wire,
};

use super::{
    descend::descend,
    node::{Node, NodeMut},
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
        leaf.read(|words| {
            let node = Node(words);
            node.search(self.key).ok().map(|index| node.value(index))
        })
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
        let (found, count, capacity) = descent.page.read(|words| {
            let node = Node(words);
            let found = node.search(self.key).map(|index| (index, node.value(index)));
            (found, node.count(), node.capacity())
        })?;
        match (found, self.mode) {
            (Ok((_, value)), PutMode::Insert) => Ok(Some(value)),
            (Ok((index, value)), PutMode::Update | PutMode::Upsert) => {
                let set = |views: &mut A::Views<'_>| NodeMut::new(views, 0).set_value(index, self.value);
                access.change(vec![descent.page], vec![], set).await?;
                Ok(Some(value))
            }
            (Err(_), PutMode::Update) => Ok(None),
            (Err(index), PutMode::Insert | PutMode::Upsert) if count < capacity => {
                let insert = |views: &mut A::Views<'_>| NodeMut::new(views, 0).insert_at(index, (self.key, self.value));
                access.change(vec![descent.page], vec![], insert).await?;
                Ok(None)
            }
            (Err(_), PutMode::Insert | PutMode::Upsert) => {
                split::split(access, descent, self.key, Some(self.value)).await?;
                Ok(None)
            }
        }
    }
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
            let found = node.search(self.key).ok().map(|index| (index, node.value(index)));
            (found, node.count().saturating_sub(1), node.capacity())
        })?;
        let Some((index, value)) = found else { return Ok(None) };
        access.change(vec![leaf], vec![], |views| NodeMut::new(views, 0).remove_at(index)).await?;
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

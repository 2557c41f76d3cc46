//! What a split without the page above leaves to be done: its separator goes into the page of level 1.
//!
//! A leaf that was split from its left neighbour and is not known above is found through that one's right link. Whoever finds it
//! so has this operation sent as well; it does nothing if the separator is there, or the leaf is gone by now. It cannot happen
//! that it links to a leaf that is gone: the page above is read before the leaf, and is locked as it was then; a leaf only goes
//! in a change of the page above.

use farlink_runtime::{
    access::{Access, Cause, Interrupt, PageRef, Start},
    operation::{Code, Operation},
    ptr::{Link, RemotePtr},
    wire::{DecodeError, Wire},
};

use super::{
    BTreeLayout, KIND,
    descend::{Descent, descend, require_level},
    node::{Node, NodeMut},
    split::make_room,
};
use crate::map::KeyRange;

/// Has the page above the leaves lead to a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Install {
    /// The leaf's low fence.
    pub separator: u64,
    /// The leaf.
    pub page: RemotePtr,
}

impl Wire for Install {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.separator, self.page.raw()]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { separator: u64::decode(from)?, page: RemotePtr::decode(from)? })
    }
}

impl Operation for Install {
    /// Whether there was anything to do.
    type Output = bool;
    type Layout = BTreeLayout;
    const CODE: Code = Code { structure: KIND, operation: 64 };

    fn begins(&self) -> Option<KeyRange> {
        Some(KeyRange::only(self.separator))
    }

    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<bool, Interrupt> {
        let Self { separator, page } = *self;
        let Descent { page: above, .. } = descend(access, from, separator, 1).await?;
        if above.level() == 0 {
            return Ok(false);
        }
        let place =
            above.read(|words| (Node(words).search(separator), Node(words).count() < Node(words).capacity()))?;
        let (Err(index), has_room) = place else { return Ok(false) };
        let leaf = match access.follow(&above, Link::remote(page)).await {
            Err(Interrupt::Restart(Cause::Stale { .. })) => return Ok(false),
            leaf => leaf?,
        };
        let is_it = require_level(&leaf, 0).is_ok() && leaf.read(|words| Node(words).low() == separator)?;
        if !is_it {
            return Ok(false);
        }
        if !has_room {
            make_room(access, separator, 1).await?;
            return Err(Interrupt::stale(above.at(), "it had to split first"));
        }
        let install = |views: &mut A::Views<'_>| NodeMut::new(views, 0).insert_at(index, (separator, page.raw()));
        access.change(vec![above], vec![], install).await?;
        Ok(true)
    }
}

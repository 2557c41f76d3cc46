//! The record of one change on its way to remote memory.

use smallvec::SmallVec;

use super::{
    record::{Body, Evidence, mark_at},
    ring::Places,
};
use crate::{
    buffer::Buffer,
    error::Error,
    ptr::{RemotePtr, ServerId},
    remote::{Payload, Remote, write_words},
};

type Failure = Box<Error>;

/// The record of a change: a copy for each memory server of its pages.
#[derive(Debug)]
pub(crate) struct Recording {
    body: Body,
    evidence: Evidence,
    sequence: u64,
    copies: SmallVec<[Copy; 1]>,
}

#[derive(Debug)]
struct Copy {
    server: ServerId,
    /// One for each part, until they are posted.
    buffers: SmallVec<[Buffer; 1]>,
    /// Held until the change has ended.
    places: Option<Places>,
}

impl Recording {
    /// Takes the buffers for a record on these memory servers, each named once.
    ///
    /// # Errors
    /// If a buffer cannot be had.
    pub(crate) fn new(
        remote: &impl Remote,
        body: Body,
        evidence: Evidence,
        servers: impl IntoIterator<Item = ServerId>,
    ) -> Result<Self, Error> {
        let copy = |server| {
            let buffers = body.parts().map(|words| remote.buffer(words)).collect::<Result<_, _>>()?;
            Ok(Copy { server, buffers, places: None })
        };
        let copies = servers.into_iter().map(copy).collect::<Result<_, Error>>()?;
        Ok(Self { body, evidence, sequence: 0, copies })
    }

    /// How long its parts are.
    pub(crate) fn parts(&self) -> SmallVec<[usize; 2]> {
        self.body.parts().collect()
    }

    /// Where there are to be copies of it.
    pub(crate) fn servers(&self) -> impl Iterator<Item = ServerId> {
        self.copies.iter().map(|copy| copy.server)
    }

    /// Gives it its number and its places, in the order of [`Recording::servers`]. To be called under the local slots of its pages.
    pub(crate) fn seal(&mut self, remote: &impl Remote, sequence: u64, places: impl IntoIterator<Item = Places>) {
        self.sequence = sequence;
        for (copy, places) in self.copies.iter_mut().zip(places) {
            let parts = places.at().zip(copy.buffers.iter_mut().map(|buffer| &mut buffer[..]));
            self.body.seal(remote.owner(), sequence, parts);
            copy.places = Some(places);
        }
    }

    /// Posts it.
    pub(crate) fn post<'r, R: Remote>(
        &mut self,
        remote: &'r R,
    ) -> SmallVec<[impl Future<Output = Result<(), Failure>> + use<'r, R>; 1]> {
        let mut posted = SmallVec::new();
        for copy in &mut self.copies {
            let places = copy.places.as_ref().expect("a record has its places before it is posted");
            let parts = places.at().zip(copy.buffers.drain(..));
            posted.extend(parts.map(|(at, buffer)| remote.write(at, Payload::Words(buffer))));
        }
        posted
    }

    /// Writes it, and waits until it is there.
    ///
    /// # Errors
    /// If a memory server is lost.
    pub(crate) async fn write<R: Remote>(&mut self, remote: &R) -> Result<(), Failure> {
        let mut failed = false;
        for posted in self.post(remote) {
            match posted.await {
                Err(error) if !error.may_be_tried_again() => return Err(error),
                outcome => failed |= outcome.is_err(),
            }
        }
        if failed {
            for copy in &self.copies {
                for (at, words) in self.words_of(remote, copy) {
                    let words = words.into_iter().enumerate().map(|(index, word)| (at.word(index), word));
                    write_words(remote, words.collect()).await?;
                }
            }
        }
        Ok(())
    }

    /// Has it mean nothing, if it was written.
    ///
    /// # Errors
    /// If a memory server is lost.
    pub(crate) async fn void<R: Remote>(&self, remote: &R) -> Result<(), Failure> {
        let firsts = self.copies.iter().filter_map(|copy| copy.places.as_ref()?.at().next());
        write_words(remote, firsts.map(|at| (at, 0)).collect()).await
    }

    /// The words of its parts, with their places, and where it is to be marked.
    pub(crate) fn words(&self, remote: &impl Remote) -> Vec<(RemotePtr, Vec<u64>)> {
        self.copies.iter().flat_map(|copy| self.words_of(remote, copy)).collect()
    }

    fn words_of(&self, remote: &impl Remote, copy: &Copy) -> Vec<(RemotePtr, Vec<u64>)> {
        let places = copy.places.iter().flat_map(Places::at);
        let mut parts: Vec<_> = places.zip(self.body.parts().map(|words| vec![0; words])).collect();
        let sealed = parts.iter_mut().map(|(at, words)| (*at, &mut words[..]));
        self.body.seal(remote.owner(), self.sequence, sealed);
        parts
    }

    /// The marks that say that all locks are had, if it needs any: one on each memory server.
    pub(crate) fn marks(&self) -> Vec<(RemotePtr, u64)> {
        if self.evidence != Evidence::Mark {
            return Vec::new();
        }
        let first_part = |copy: &Copy| copy.places.as_ref()?.at().zip(self.body.parts()).next();
        self.copies.iter().filter_map(first_part).map(|(at, words)| (mark_at(at, words), self.sequence)).collect()
    }
}

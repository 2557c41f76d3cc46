//! Messages: what frames carry, once put together. Everything is checked on arrival; nothing is trusted.
//!
//! ```text
//! request   [items:16 | type:8]  sequence  acknowledged   item...   item: [words:32 | kind:32]               parameters...
//! reply     [items:16 | type:8]  sequence                 item...   item: [words:32 | index:16 | status:16]  result...
//! hello-ack   [type:8]  the server's incarnation  the worker's session
//! nack [type:8]  why
//! goodbye [type:8]
//! ```
//!
//! A request has one item, or several, which are answered in one reply; the items of a reply come in any order.

use farlink_fabric::wire::DecodeError;

use crate::protocol::{ITEMS_MAX, Kind, Refusal};

const REQUEST: u64 = 1;
const REPLY: u64 = 2;
const HELLO_ACK: u64 = 3;
const NACK: u64 = 4;
/// The whole message.
pub(crate) const GOODBYE: u64 = 5;

pub(crate) const REPLY_HEADER: usize = 2;

/// A request as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestView<'a> {
    /// Its number, counted by the worker from 1.
    pub sequence: u64,
    /// The worker has all replies to requests below this.
    pub acknowledged: u64,
    /// How many items follow.
    pub items: usize,
    rest: &'a [u64],
}

/// A reply as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyView<'a> {
    /// The request's number.
    pub sequence: u64,
    /// How many items follow.
    pub items: usize,
    rest: &'a [u64],
}

/// One item of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyItem {
    /// Which item of the request it answers.
    pub index: usize,
    /// Whether it was refused.
    pub status: Result<(), Refusal>,
    /// Where its words are in the whole message.
    pub words: std::ops::Range<usize>,
}

/// A message of a worker to a memory server.
///
/// # Errors
/// If it is none. If its sequence number can be told nevertheless, that comes with the error.
pub fn read_request(words: &[u64]) -> Result<RequestView<'_>, (DecodeError, Option<u64>)> {
    let &[first, sequence, acknowledged, ref rest @ ..] = words else {
        return Err((DecodeError("a request ends too early"), None));
    };
    let items = match first & 0xff {
        REQUEST => (first >> 8) as usize,
        _ => return Err((DecodeError("a message is no request"), None)),
    };
    let bad = |why| Err((DecodeError(why), Some(sequence)));
    if sequence == 0 || sequence == u64::MAX || acknowledged > sequence {
        return Err((DecodeError("a request's sequence number is impossible"), None));
    }
    if !(1..=ITEMS_MAX).contains(&items) {
        return bad("a request has no items, or too many");
    }
    let view = RequestView { sequence, acknowledged, items, rest };
    let mut left = rest;
    for _ in 0..items {
        let Some((&header, behind)) = left.split_first() else { return bad("a request's items end too early") };
        let Some(behind) = usize::try_from(header >> 32).ok().and_then(|words| behind.get(words..)) else {
            return bad("an item is longer than the request");
        };
        left = behind;
    }
    if left.is_empty() { Ok(view) } else { bad("words left over behind the last item") }
}

impl<'a> RequestView<'a> {
    /// Kinds and parameters.
    pub fn items(&self) -> impl Iterator<Item = (Kind, &'a [u64])> + use<'a> {
        let mut left = self.rest;
        std::iter::from_fn(move || {
            let (&header, behind) = left.split_first()?;
            let (params, behind) = behind.split_at_checked((header >> 32) as usize)?;
            left = behind;
            Some((Kind(header as u32), params))
        })
    }
}

/// Begins a request.
pub(crate) fn begin_request(to: &mut Vec<u64>, items: usize, sequence: u64, acknowledged: u64) {
    to.extend([(items as u64) << 8 | REQUEST, sequence, acknowledged]);
}

/// Appends an item whose parameters `encode` appends.
pub(crate) fn push_item(to: &mut Vec<u64>, kind: Kind, encode: impl FnOnce(&mut Vec<u64>)) {
    let header = to.len();
    to.push(0);
    encode(to);
    to[header] = ((to.len() - header - 1) as u64) << 32 | u64::from(kind.0);
}

/// The header of a reply.
pub(crate) fn reply_header(items: usize, sequence: u64) -> [u64; REPLY_HEADER] {
    [(items as u64) << 8 | REPLY, sequence]
}

/// A reply that refuses a whole request.
pub(crate) fn refusal(sequence: u64, why: Refusal) -> [u64; 3] {
    [1 << 8 | REPLY, sequence, reply_item(0, 0, Err(why))]
}

/// The first word of a reply's item.
pub(crate) fn reply_item(words: usize, index: u16, status: Result<(), Refusal>) -> u64 {
    let status = status.err().map_or(0, Refusal::code);
    (words as u64) << 32 | u64::from(index) << 16 | u64::from(status)
}

/// What a memory server says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromServer<'a> {
    /// The answer to a request.
    Reply(ReplyView<'a>),
    /// The connection is open.
    HelloAck {
        /// The server's incarnation: another number, another server.
        server: u64,
        /// The worker's session. The same again: the server still has what it answered this worker on an earlier connection.
        session: u64,
    },
    /// A message could not be made sense of, and not even its number told.
    Nack(u64),
    /// The server ends. What it has answered was sent before this; what else it was sent it has not taken.
    Goodbye,
}

/// A message of a memory server to a worker.
///
/// # Errors
/// If it is none.
pub fn read_from_server(words: &[u64]) -> Result<FromServer<'_>, DecodeError> {
    let Some(&first) = words.first() else { return Err(DecodeError("a message is empty")) };
    match (first & 0xff, words) {
        (REPLY, &[first, sequence, ref rest @ ..]) => {
            let items = (first >> 8) as usize;
            if !(1..=ITEMS_MAX).contains(&items) {
                return Err(DecodeError("a reply has no items, or too many"));
            }
            let view = ReplyView { sequence, items, rest };
            let mut seen = 0;
            let mut end = REPLY_HEADER;
            for item in view.items() {
                let item = item?;
                end = item.words.end;
                seen += 1;
            }
            if seen != items || end != words.len() {
                return Err(DecodeError("a reply has fewer or more items than it says"));
            }
            Ok(FromServer::Reply(view))
        }
        (HELLO_ACK, &[HELLO_ACK, server, session]) => Ok(FromServer::HelloAck { server, session }),
        (NACK, &[NACK, why]) => Ok(FromServer::Nack(why)),
        (GOODBYE, &[GOODBYE]) => Ok(FromServer::Goodbye),
        _ => Err(DecodeError("a message of the server is of no known type")),
    }
}

impl<'a> ReplyView<'a> {
    /// A reply whose items are taken as they are.
    pub(crate) fn of(words: &'a [u64]) -> Option<Self> {
        let &[first, sequence, ref rest @ ..] = words else { return None };
        Some(Self { sequence, items: (first >> 8) as usize, rest })
    }

    /// The items; an error ends them.
    pub fn items(&self) -> impl Iterator<Item = Result<ReplyItem, DecodeError>> + use<'a> {
        self.into_items()
    }

    pub(crate) fn into_items(self) -> impl Iterator<Item = Result<ReplyItem, DecodeError>> + use<'a> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let &header = self.rest.get(at)?;
            at += 1;
            let (first, words) = (at, (header >> 32) as usize);
            if words > self.rest.len() - at {
                at = self.rest.len();
                return Some(Err(DecodeError("an item is longer than the reply")));
            }
            at += words;
            let status = match header as u16 {
                0 => Ok(()),
                code => Err(Refusal::of_code(code)),
            };
            let words = REPLY_HEADER + first..REPLY_HEADER + first + words;
            Some(Ok(ReplyItem { index: usize::from((header >> 16) as u16), status, words }))
        })
    }
}

pub(crate) fn hello_ack(server: u64, session: u64) -> [u64; 3] {
    [HELLO_ACK, server, session]
}

pub(crate) fn nack(refusal: Refusal) -> [u64; 2] {
    [NACK, u64::from(refusal.code())]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_round_trip(
            sequence in 1..u64::MAX, back in 0u64..100,
            items in prop::collection::vec((any::<u32>(), prop::collection::vec(any::<u64>(), 0..9)), 1..9),
            cut in 0usize..200
        ) {
            let acknowledged = sequence.saturating_sub(back);
            let mut words = Vec::new();
            begin_request(&mut words, items.len(), sequence, acknowledged);
            for (kind, params) in &items {
                push_item(&mut words, Kind(*kind), |to| to.extend(params));
            }
            let view = read_request(&words).unwrap();
            prop_assert_eq!((view.sequence, view.acknowledged, view.items), (sequence, acknowledged, items.len()));
            let read: Vec<_> = view.items().map(|(kind, params)| (kind.0, params.to_vec())).collect();
            prop_assert_eq!(read, items);
            if cut < words.len() {
                prop_assert!(read_request(&words[..cut]).is_err());
            }
            words.push(7);
            prop_assert!(read_request(&words).is_err());
        }

        #[test]
        fn random_words_are_read_or_refused(words in prop::collection::vec(prop_oneof![0u64..6, any::<u64>(), (0u64..5, 0u64..5).prop_map(|(high, low)| high << 32 | low), (0u64..5).prop_map(|items| items << 8 | REPLY), (0u64..5).prop_map(|items| items << 8 | REQUEST)], 0..12)) {
            if let Ok(view) = read_request(&words) {
                prop_assert_eq!(view.items().count(), view.items);
            }
            if let Ok(FromServer::Reply(view)) = read_from_server(&words) {
                for item in view.items() {
                    prop_assert!(words.get(item.unwrap().words).is_some());
                }
            }
        }
    }
}

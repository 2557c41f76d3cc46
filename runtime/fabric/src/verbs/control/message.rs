//! What a compute server asks of a memory server, or of a compute server that listens, and the answers.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::super::ib::{Atomics, Peer};
use crate::{
    connection::{ConnectionState, PeerId},
    lock::OwnerId,
    wire::{DecodeError, Wire},
};

/// Words of the longest text in an answer.
const TEXT_BYTES_MAX: usize = 1024;

/// What a memory server is: its first message. A compute server that listens is none of 0, and has no region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct HelloAck {
    /// Which of the cluster's memory servers it is.
    pub(in super::super) server: u64,
    /// How many there are.
    pub(in super::super) servers: u64,
    /// The cluster's id.
    pub(in super::super) cluster: u64,
    /// Where its region begins, in its own addresses.
    pub(in super::super) address: u64,
    /// Bytes of the region.
    pub(in super::super) bytes: u64,
    /// The key to the region.
    pub(in super::super) key: u32,
    /// What atomics to the region are atomic against: its device carries them out.
    pub(in super::super) atomics: Atomics,
    /// Whether it relies on WRITEs being placed in the order of their posting.
    pub(in super::super) ordered: bool,
}

impl Wire for HelloAck {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.server, self.servers, self.cluster, self.address, self.bytes, u64::from(self.key)]);
        self.atomics.encode(to);
        self.ordered.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let mut next = || u64::decode(from);
        Ok(Self {
            server: next()?,
            servers: next()?,
            cluster: next()?,
            address: next()?,
            bytes: next()?,
            key: narrow(next()?)?,
            atomics: Atomics::decode(from)?,
            ordered: bool::decode(from)?,
        })
    }
}

impl Wire for Atomics {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(match self {
            Self::None => 0,
            Self::Device => 1,
            Self::Global => 2,
        });
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(match u64::decode(from)? {
            0 => Self::None,
            1 => Self::Device,
            2 => Self::Global,
            _ => return Err(DecodeError("there are no such atomics")),
        })
    }
}

fn narrow<T: TryFrom<u64>>(word: u64) -> Result<T, DecodeError> {
    T::try_from(word).map_err(|_| DecodeError("a number is out of its range"))
}

impl Wire for Peer {
    fn encode(&self, to: &mut Vec<u64>) {
        let (halves, _) = self.gid.as_chunks();
        to.extend([
            u64::from(self.queue_pair),
            u64::from(self.first_packet),
            u64::from(self.lid),
            u64::from_be_bytes(halves[0]),
            u64::from_be_bytes(halves[1]),
            u64::from(self.mtu),
            u64::from(self.reads_out),
            u64::from(self.reads_in),
        ]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let mut next = || u64::decode(from);
        let (queue_pair, first_packet, lid) = (narrow(next()?)?, narrow(next()?)?, narrow(next()?)?);
        let mut gid = [0; 16];
        gid[..8].copy_from_slice(&next()?.to_be_bytes());
        gid[8..].copy_from_slice(&next()?.to_be_bytes());
        let peer = Self {
            queue_pair,
            first_packet,
            lid,
            gid,
            mtu: narrow(next()?)?,
            reads_out: narrow(next()?)?,
            reads_in: narrow(next()?)?,
        };
        let numbers_fit = queue_pair < 1 << 24 && first_packet < 1 << 24;
        if !numbers_fit || !(1..=5).contains(&peer.mtu) {
            return Err(DecodeError("a queue pair cannot be as it is described"));
        }
        Ok(peer)
    }
}

/// Memory that one side of a message connection opens to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Opened {
    /// Where it begins, in its owner's addresses.
    pub(in super::super) address: u64,
    pub(in super::super) key: u32,
}

impl Wire for Opened {
    fn encode(&self, to: &mut Vec<u64>) {
        to.extend([self.address, u64::from(self.key)]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { address: u64::decode(from)?, key: narrow(u64::decode(from)?)? })
    }
}

impl Wire for PeerId {
    fn encode(&self, to: &mut Vec<u64>) {
        self.owner.encode(to);
        to.push(u64::from(self.worker));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { owner: OwnerId::decode(from)?, worker: narrow(u64::decode(from)?)? })
    }
}

impl Wire for ConnectionState {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(match self {
            Self::Up => 0,
            Self::Dismissed => 1,
            Self::Dead => 2,
        });
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(match u64::decode(from)? {
            0 => Self::Up,
            1 => Self::Dismissed,
            2 => Self::Dead,
            _ => return Err(DecodeError("there is no such state of a connection")),
        })
    }
}

/// What a compute server wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Question {
    /// A queue pair for this one of the asker's; an earlier one of the memory server's is destroyed first.
    Connect { ours: Peer, instead_of: Option<u64> },
    /// Destroy this queue pair of the memory server's.
    Disconnect(u64),
    /// This incarnation is the asker's.
    Claim(OwnerId),
    /// It has ended in good order.
    Release(OwnerId),
    /// Does it live, as far as this memory server knows?
    Lives(OwnerId),
    /// Does it take messages?
    Listens,
    /// A message connection for this queue pair and this worker of the asker's, who opens this memory. Whether it relies on WRITEs being placed
    /// in the order of their posting.
    Attach { ours: Peer, who: PeerId, opened: Opened, ordered: bool },
    /// The asker's queue pair of the message connection of this name is ready.
    AttachReady(u64),
    /// Close the message connection of this name; whether the asker has no use for it any more.
    Detach(u64, bool),
    /// What has become of it?
    ConnectionState(u64),
    /// The asker, whose incarnation this is, takes control connections of compute servers at this port; at 0 no more.
    Listen { owner: OwnerId, port: u16 },
    /// Where does this one take them?
    WhereListens(OwnerId),
}

/// What the memory server says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum Answer {
    /// Its queue pair, connected.
    Connected(Peer),
    /// It is done.
    Done,
    /// It lives, or not.
    Lives(bool),
    /// It was not done, and why.
    Refused(String),
    /// It takes messages; each side of a connection opens so many bytes.
    Listens { bytes: u64 },
    /// A message connection: what it is called over this control connection, where no other ever is called so; its queue pair,
    /// connected, and the memory that it opens.
    Attached { name: u64, theirs: Peer, opened: Opened },
    /// What has become of a connection.
    State(ConnectionState),
    /// Where a compute server takes control connections. Its host is as the memory server sees it.
    ListensAt(SocketAddr),
}

impl Wire for SocketAddr {
    fn encode(&self, to: &mut Vec<u64>) {
        let host = match self.ip() {
            IpAddr::V4(host) => host.to_ipv6_mapped(),
            IpAddr::V6(host) => host,
        };
        let host = u128::from(host);
        to.extend([(host >> 64) as u64, host as u64, u64::from(self.port())]);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let host = (u128::from(u64::decode(from)?) << 64) | u128::from(u64::decode(from)?);
        Ok(Self::new(Ipv6Addr::from(host).to_canonical(), narrow(u64::decode(from)?)?))
    }
}

impl Wire for OwnerId {
    fn encode(&self, to: &mut Vec<u64>) {
        to.push(u64::from(self.incarnation()));
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Self::new(u64::decode(from)?).ok_or(DecodeError("an incarnation is out of its range"))
    }
}

impl Wire for Question {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Connect { ours, instead_of } => {
                to.push(0);
                ours.encode(to);
                instead_of.encode(to);
            }
            Self::Disconnect(queue_pair) => to.extend([1, *queue_pair]),
            Self::Claim(owner) => {
                to.push(2);
                owner.encode(to);
            }
            Self::Release(owner) => {
                to.push(3);
                owner.encode(to);
            }
            Self::Lives(owner) => {
                to.push(4);
                owner.encode(to);
            }
            Self::Listens => to.push(5),
            Self::Attach { ours, who, opened, ordered } => {
                to.push(6);
                ours.encode(to);
                who.encode(to);
                opened.encode(to);
                ordered.encode(to);
            }
            Self::Detach(name, in_order) => to.extend([8, *name, u64::from(*in_order)]),
            Self::ConnectionState(name) => to.extend([9, *name]),
            Self::AttachReady(name) => to.extend([7, *name]),
            Self::Listen { owner, port } => {
                to.push(10);
                owner.encode(to);
                to.push(u64::from(*port));
            }
            Self::WhereListens(owner) => {
                to.push(11);
                owner.encode(to);
            }
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(match u64::decode(from)? {
            0 => Self::Connect { ours: Peer::decode(from)?, instead_of: Option::decode(from)? },
            1 => Self::Disconnect(u64::decode(from)?),
            2 => Self::Claim(OwnerId::decode(from)?),
            3 => Self::Release(OwnerId::decode(from)?),
            4 => Self::Lives(OwnerId::decode(from)?),
            5 => Self::Listens,
            6 => Self::Attach {
                ours: Peer::decode(from)?,
                who: PeerId::decode(from)?,
                opened: Opened::decode(from)?,
                ordered: bool::decode(from)?,
            },
            8 => Self::Detach(u64::decode(from)?, bool::decode(from)?),
            9 => Self::ConnectionState(u64::decode(from)?),
            7 => Self::AttachReady(u64::decode(from)?),
            10 => Self::Listen { owner: OwnerId::decode(from)?, port: narrow(u64::decode(from)?)? },
            11 => Self::WhereListens(OwnerId::decode(from)?),
            _ => return Err(DecodeError("there is no such question")),
        })
    }
}

impl Wire for Answer {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Connected(peer) => {
                to.push(0);
                peer.encode(to);
            }
            Self::Done => to.push(1),
            Self::Lives(lives) => {
                to.push(2);
                lives.encode(to);
            }
            Self::Refused(why) => {
                to.push(3);
                let bytes = &why.as_bytes()[..why.floor_char_boundary(TEXT_BYTES_MAX)];
                to.push(bytes.len() as u64);
                for piece in bytes.chunks(8) {
                    let mut word = [0; 8];
                    word[..piece.len()].copy_from_slice(piece);
                    to.push(u64::from_le_bytes(word));
                }
            }
            Self::Listens { bytes } => to.extend([4, *bytes]),
            Self::Attached { name, theirs, opened } => {
                to.extend([5, *name]);
                theirs.encode(to);
                opened.encode(to);
            }
            Self::State(state) => {
                to.push(6);
                state.encode(to);
            }
            Self::ListensAt(address) => {
                to.push(7);
                address.encode(to);
            }
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(match u64::decode(from)? {
            0 => Self::Connected(Peer::decode(from)?),
            1 => Self::Done,
            2 => Self::Lives(bool::decode(from)?),
            3 => Self::Refused(decode_text(from)?),
            4 => Self::Listens { bytes: u64::decode(from)? },
            5 => {
                Self::Attached { name: u64::decode(from)?, theirs: Peer::decode(from)?, opened: Opened::decode(from)? }
            }
            6 => Self::State(ConnectionState::decode(from)?),
            7 => Self::ListensAt(SocketAddr::decode(from)?),
            _ => return Err(DecodeError("there is no such answer")),
        })
    }
}

fn decode_text(from: &mut &[u64]) -> Result<String, DecodeError> {
    let length = usize::try_from(u64::decode(from)?).unwrap_or(usize::MAX);
    if length > TEXT_BYTES_MAX {
        return Err(DecodeError("a text is too long"));
    }
    let words = from.split_off(..length.div_ceil(8)).ok_or(DecodeError("it ends too early"))?;
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(length);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::decode_all;

    fn peer() -> Peer {
        Peer {
            queue_pair: 17,
            first_packet: 99,
            lid: 3,
            gid: *b"0123456789abcdef",
            mtu: 3,
            reads_out: 16,
            reads_in: 128,
        }
    }

    fn comes_back<T: Wire + PartialEq + std::fmt::Debug>(message: T) {
        let mut words = Vec::new();
        message.encode(&mut words);
        assert_eq!(decode_all::<T>(&words).unwrap(), message);
        for cut in 0..words.len() {
            assert!(decode_all::<T>(&words[..cut]).is_err(), "{message:?} cut to {cut} words");
        }
    }

    #[test]
    fn messages_come_back_and_cut_ones_do_not() {
        let owner = OwnerId::new(5).unwrap();
        comes_back(Question::Connect { ours: peer(), instead_of: None });
        comes_back(Question::Connect { ours: peer(), instead_of: Some(4) });
        comes_back(Question::Disconnect(9));
        [Question::Claim(owner), Question::Release(owner), Question::Lives(owner)].into_iter().for_each(comes_back);
        [Question::Listen { owner, port: 7 }, Question::WhereListens(owner)].into_iter().for_each(comes_back);
        ["10.0.0.1:7471", "[fe80::1]:65535"]
            .map(|at| Answer::ListensAt(at.parse().unwrap()))
            .into_iter()
            .for_each(comes_back);
        comes_back(Answer::Connected(peer()));
        [Answer::Done, Answer::Lives(true), Answer::Lives(false)].into_iter().for_each(comes_back);
        comes_back(Answer::Refused("no queue pair left: ü".into()));
        let opened = Opened { address: 4096, key: 7 };
        for ordered in [true, false] {
            comes_back(Question::Attach { ours: peer(), who: PeerId { owner, worker: 3 }, opened, ordered });
        }
        [
            Question::Listens,
            Question::AttachReady(9),
            Question::Detach(9, true),
            Question::Detach(9, false),
            Question::ConnectionState(9),
        ]
        .into_iter()
        .for_each(comes_back);
        comes_back(Answer::Attached { name: 1 << 40, theirs: peer(), opened });
        comes_back(Answer::Listens { bytes: 1 << 20 });
        [ConnectionState::Up, ConnectionState::Dismissed, ConnectionState::Dead]
            .map(Answer::State)
            .into_iter()
            .for_each(comes_back);
        for atomics in [Atomics::None, Atomics::Device, Atomics::Global] {
            for ordered in [true, false] {
                comes_back(HelloAck {
                    server: 1,
                    servers: 2,
                    cluster: 3,
                    address: 4,
                    bytes: 5,
                    key: 6,
                    atomics,
                    ordered,
                });
            }
        }
    }

    proptest! {
        #[test]
        fn random_messages_do_not_panic(mut words: Vec<u64>, tag in 0u64..14) {
            let _ = decode_all::<Question>(&words);
            let _ = decode_all::<Answer>(&words);
            let _ = decode_all::<HelloAck>(&words);
            words.insert(0, tag);
            let _ = decode_all::<Question>(&words);
            let _ = decode_all::<Answer>(&words);
        }
    }
}

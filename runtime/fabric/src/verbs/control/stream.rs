//! Sealed frames over TCP, and reading with a deadline.
//!
//! ```text
//! frame: [length of the payload: u16, little-endian | payload | HMAC-SHA-256 over number, length and payload]
//! ```

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use super::secret::{Secret, TAG_BYTES};
use crate::{
    error::Error,
    wire::{DecodeError, Wire, decode_all},
};

/// Bytes of the longest payload. Nothing that is sent comes near it.
const PAYLOAD_BYTES_MAX: usize = 4096;
/// How long a write may take. Frames are small, and the other side always reads.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// Fills `buffer` before the deadline.
pub(super) fn read_until(stream: &mut TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Has the system notice within seconds that the other machine is gone; the end of the other process it tells at once.
pub(in super::super) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let set = |level, option, value: libc::c_int| {
        // SAFETY: the descriptor is open; the option's value outlives the call and has the length that is stated.
        let code = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1)?;
    set(libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 6)?;
    set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 8000)
}

/// One direction of a connection: its key, and how many frames have gone.
#[derive(Debug)]
struct Seal {
    key: Secret,
    frames: u64,
}

impl Seal {
    fn next(&mut self) -> [u8; 8] {
        let number = self.frames;
        self.frames += 1;
        number.to_le_bytes()
    }
}

const PURPOSE: &str = "farlink frame";

/// The sending half.
#[derive(Debug)]
pub(in super::super) struct Sender {
    stream: TcpStream,
    seal: Seal,
}

/// The receiving half.
#[derive(Debug)]
pub(in super::super) struct Receiver {
    stream: TcpStream,
    seal: Seal,
}

/// The halves of an authenticated connection.
pub(super) fn halves(stream: TcpStream, send_key: Secret, receive_key: Secret) -> io::Result<(Sender, Receiver)> {
    stream.set_read_timeout(None)?;
    let sender = Sender { stream: stream.try_clone()?, seal: Seal { key: send_key, frames: 0 } };
    Ok((sender, Receiver { stream, seal: Seal { key: receive_key, frames: 0 } }))
}

impl Sender {
    /// Sends a message. Blocks only if the other side does not read, and not for long.
    pub(in super::super) fn send(&mut self, message: &impl Wire) -> io::Result<()> {
        let mut words = Vec::new();
        message.encode(&mut words);
        let length = words.len() * 8;
        if length > PAYLOAD_BYTES_MAX {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the message is too long"));
        }
        let mut frame = Vec::with_capacity(2 + length + TAG_BYTES);
        frame.extend((length as u16).to_le_bytes());
        words.iter().for_each(|word| frame.extend(word.to_le_bytes()));
        let number = self.seal.next();
        let tag = self.seal.key.tag(PURPOSE, &[&number, &frame]);
        frame.extend(tag);
        self.stream.write_all(&frame)
    }

    #[cfg(test)]
    pub(super) fn tag_of(&self, frame: &[u8]) -> [u8; TAG_BYTES] {
        self.seal.key.tag(PURPOSE, &[&self.seal.frames.to_le_bytes(), frame])
    }

    /// Ends the connection, for both halves and the other side.
    pub(in super::super) fn shut_down(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Receiver {
    /// How long [`Receiver::receive`] waits; without a limit, as long as the connection lasts.
    pub(in super::super) fn set_limit(&self, limit: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(limit)
    }

    /// Waits for the next message. `None` at the connection's end.
    ///
    /// # Errors
    /// If the connection breaks, or brings what the other side cannot have sent. It is of no use afterwards.
    pub(in super::super) fn receive<T: Wire>(&mut self) -> Result<Option<T>, Error> {
        let failed = || Error::io("reading from a control connection");
        let mut length = [0; 2];
        match self.stream.read_exact(&mut length) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            read => read.map_err(failed())?,
        }
        let bytes = usize::from(u16::from_le_bytes(length));
        if bytes > PAYLOAD_BYTES_MAX || !bytes.is_multiple_of(8) {
            return Err(DecodeError("a control message has an impossible length").into());
        }
        let mut payload = vec![0; bytes];
        self.stream.read_exact(&mut payload).map_err(failed())?;
        let mut tag = [0; TAG_BYTES];
        self.stream.read_exact(&mut tag).map_err(failed())?;
        let number = self.seal.next();
        if !self.seal.key.verify(PURPOSE, &[&number, &length, &payload], &tag) {
            return Err(DecodeError("a control message is not by the peer: its seal does not fit").into());
        }
        let (words, _) = payload.as_chunks();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        Ok(decode_all(&words).map(Some)?)
    }
}

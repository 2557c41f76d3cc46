//! Both sides prove that they know the secret.

use std::{
    io::{self, ErrorKind, Write},
    net::TcpStream,
    time::Instant,
};

use super::{
    secret::{Secret, TAG_BYTES},
    stream::{self, Receiver, Sender, read_until},
};

const MAGIC: [u8; 8] = *b"farlink\x06";
const NONCE_BYTES: usize = 32;
const HELLO_BYTES: usize = MAGIC.len() + NONCE_BYTES;
const COMPUTE: &str = "farlink compute server";
const MEMORY: &str = "farlink memory server";

type Nonce = [u8; NONCE_BYTES];

fn hello(nonce: &Nonce) -> [u8; HELLO_BYTES] {
    let mut hello = [0; HELLO_BYTES];
    hello[..MAGIC.len()].copy_from_slice(&MAGIC);
    hello[MAGIC.len()..].copy_from_slice(nonce);
    hello
}

fn read_hello(from: &mut TcpStream, deadline: Instant) -> io::Result<Nonce> {
    let mut hello = [0; HELLO_BYTES];
    read_until(from, &mut hello, deadline)?;
    let (magic, nonce) = hello.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(io::Error::new(ErrorKind::InvalidData, "it does not speak farlink's protocol, or another version"));
    }
    Ok(nonce.try_into().expect("the length of a nonce"))
}

fn keys(secret: &Secret, nonces: &[&[u8]; 2]) -> (Secret, Secret) {
    let key = |purpose| Secret::new(secret.tag(purpose, nonces)).expect("a tag is long enough for a key");
    (key("farlink frames of the compute server"), key("farlink frames of the memory server"))
}

fn wrong_secret(side: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("the {side} does not know the cluster's secret"))
}

/// The memory server's side. Answers with a proof only to whoever has given one.
pub(in super::super) fn accept(
    mut stream: TcpStream,
    secret: &Secret,
    deadline: Instant,
) -> io::Result<(Sender, Receiver)> {
    let theirs = read_hello(&mut stream, deadline)?;
    let ours: Nonce = rand::random();
    stream.write_all(&hello(&ours))?;
    let nonces: [&[u8]; 2] = [&theirs, &ours];
    let mut proof = [0; TAG_BYTES];
    read_until(&mut stream, &mut proof, deadline)?;
    if !secret.verify(COMPUTE, &nonces, &proof) {
        return Err(wrong_secret("compute server"));
    }
    stream.write_all(&secret.tag(MEMORY, &nonces))?;
    let (compute, memory) = keys(secret, &nonces);
    stream::halves(stream, memory, compute)
}

/// The compute server's side.
pub(in super::super) fn connect(
    mut stream: TcpStream,
    secret: &Secret,
    deadline: Instant,
) -> io::Result<(Sender, Receiver)> {
    let ours: Nonce = rand::random();
    stream.write_all(&hello(&ours))?;
    let theirs = read_hello(&mut stream, deadline)?;
    let nonces: [&[u8]; 2] = [&ours, &theirs];
    stream.write_all(&secret.tag(COMPUTE, &nonces))?;
    let mut proof = [0; TAG_BYTES];
    read_until(&mut stream, &mut proof, deadline).map_err(|error| match error.kind() {
        // A memory server hangs up on whoever does not know its secret.
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            let why = "the memory server hung up: it has another secret, or too many who connect at once";
            io::Error::new(ErrorKind::PermissionDenied, why)
        }
        _ => error,
    })?;
    if !secret.verify(MEMORY, &nonces, &proof) {
        return Err(wrong_secret("memory server"));
    }
    let (compute, memory) = keys(secret, &nonces);
    stream::halves(stream, compute, memory)
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{Ipv4Addr, Shutdown, TcpListener},
        thread,
        time::Duration,
    };

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn secret(text: &str) -> Secret {
        Secret::new(format!("{text} {text} {text} {text}")).unwrap()
    }

    /// A client does `there` with a server that has this secret and does `here` with what it has accepted.
    fn with_server<H, T: Send>(
        server: &Secret,
        limit: Duration,
        here: impl FnOnce(io::Result<(Sender, Receiver)>) -> H,
        there: impl FnOnce(TcpStream) -> T + Send,
    ) -> (H, T) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let client = scope.spawn(move || there(TcpStream::connect(address).unwrap()));
            let stream = listener.accept().unwrap().0;
            let here = here(accept(stream, server, Instant::now() + limit));
            (here, client.join().unwrap())
        })
    }

    /// The kind of a refusal. Somebody who was let in is shut out again, so that nobody waits for more.
    fn refusal(accepted: io::Result<(Sender, Receiver)>) -> Option<ErrorKind> {
        accepted.map(drop).err().map(|error| error.kind())
    }

    #[test]
    fn who_knows_the_secret_talks_and_listens() {
        let ours = secret("ours");
        let (accepted, connected) = with_server(
            &ours,
            LONG,
            |accepted| accepted,
            |stream| connect(stream, &secret("ours"), Instant::now() + LONG),
        );
        let ((mut server_out, mut server_in), (mut client_out, mut client_in)) =
            (accepted.unwrap(), connected.unwrap());
        for number in 0..3u64 {
            client_out.send(&number).unwrap();
            assert_eq!(server_in.receive::<u64>().unwrap(), Some(number));
            server_out.send(&(number, true)).unwrap();
            assert_eq!(client_in.receive::<(u64, bool)>().unwrap(), Some((number, true)));
        }
        client_out.shut_down();
        assert_eq!(server_in.receive::<u64>().unwrap(), None);
    }

    #[test]
    fn another_secret_is_refused_on_both_sides() {
        let (refused, connected) = with_server(&secret("ours"), LONG, refusal, |stream| {
            connect(stream, &secret("theirs"), Instant::now() + LONG)
        });
        assert_eq!(refused, Some(ErrorKind::PermissionDenied));
        assert_eq!(connected.unwrap_err().kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_server_that_only_pretends_is_refused() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let pretender = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut theirs = [0; HELLO_BYTES + TAG_BYTES];
            stream.read_exact(&mut theirs[..HELLO_BYTES]).unwrap();
            stream.write_all(&hello(&[7; NONCE_BYTES])).unwrap();
            stream.read_exact(&mut theirs[HELLO_BYTES..]).unwrap();
            // It has no other proof than the one it was given.
            stream.write_all(&theirs[HELLO_BYTES..]).unwrap();
        });
        let stream = TcpStream::connect(address).unwrap();
        let refused = connect(stream, &secret("ours"), Instant::now() + LONG).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        pretender.join().unwrap();
    }

    #[test]
    fn noise_and_silence_get_nothing() {
        let noise: Vec<u8> = (0..4096).map(|_| rand::random()).collect();
        let (refused, _) = with_server(&secret("ours"), LONG, refusal, |mut stream| stream.write_all(&noise));
        assert_eq!(refused, Some(ErrorKind::InvalidData));
        let (refused, answer) = with_server(&secret("ours"), Duration::from_millis(20), refusal, |mut stream| {
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).map(|_| answer)
        });
        assert_eq!(refused, Some(ErrorKind::TimedOut));
        assert!(answer.unwrap().is_empty());
        // A right hello and a wrong proof: the server has shown its nonce and nothing else.
        let (refused, answer) = with_server(&secret("ours"), LONG, refusal, |mut stream| {
            stream.write_all(&hello(&[1; NONCE_BYTES])).unwrap();
            stream.write_all(&[2; TAG_BYTES]).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            answer.len()
        });
        assert_eq!(refused, Some(ErrorKind::PermissionDenied));
        assert!(answer <= HELLO_BYTES);
    }

    #[test]
    fn a_proof_that_is_zero_or_cut_short_is_refused() {
        let ours = secret("ours");
        let proofs: [fn([u8; TAG_BYTES]) -> Vec<u8>; 4] = [
            |_| vec![0; TAG_BYTES],
            |right| [&right[..TAG_BYTES - 1], &[right[TAG_BYTES - 1] ^ 1]].concat(),
            |right| [&right[..16], &[0; TAG_BYTES - 16]].concat(),
            |right| right[..TAG_BYTES - 1].to_vec(),
        ];
        for proof in proofs {
            let (refused, answer) = with_server(&ours, LONG, refusal, |mut stream| {
                let nonce = [1; NONCE_BYTES];
                stream.write_all(&hello(&nonce)).unwrap();
                let theirs = read_hello(&mut stream, Instant::now() + LONG).unwrap();
                stream.write_all(&proof(ours.tag(COMPUTE, &[&nonce, &theirs]))).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                all_of(&mut stream)
            });
            assert!(refused.is_some(), "let in");
            assert!(answer.is_empty(), "whoever has no proof was given one");
        }
    }

    /// Every byte of them is another one from time to time: nobody waits for one that he has seen before.
    #[test]
    fn nonces_are_fresh_on_both_sides() {
        let ours = secret("ours");
        let mut seen: [Vec<Nonce>; 2] = Default::default();
        for _ in 0..16 {
            let (_, nonce) = with_server(&ours, LONG, refusal, |mut stream| {
                stream.write_all(&hello(&[1; NONCE_BYTES])).unwrap();
                read_hello(&mut stream, Instant::now() + LONG).unwrap()
            });
            seen[0].push(nonce);
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ours = &ours;
            seen[1].push(thread::scope(|scope| {
                scope.spawn(move || connect(stream, ours, Instant::now() + LONG).map(drop).unwrap_err());
                read_hello(&mut listener.accept().unwrap().0, Instant::now() + LONG).unwrap()
            }));
        }
        for (side, nonces) in ["memory server", "compute server"].into_iter().zip(seen) {
            for byte in 0..NONCE_BYTES {
                let first = nonces[0][byte];
                assert!(
                    nonces.iter().any(|nonce| nonce[byte] != first),
                    "byte {byte} of the {side}'s nonces is constant"
                );
            }
        }
    }

    /// All that a compute server says in a session of its own: the handshake, and one message.
    fn recorded(ours: &Secret) -> Vec<u8> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let (accepted, said) = with_server(
            ours,
            LONG,
            |accepted| accepted.unwrap().1.receive::<u64>(),
            |to_server| {
                thread::scope(|scope| {
                    scope.spawn(move || {
                        let stream = TcpStream::connect(address).unwrap();
                        let (mut sender, _receiver) = connect(stream, ours, Instant::now() + LONG).unwrap();
                        sender.send(&5u64).unwrap();
                        sender.shut_down();
                    });
                    let from_client = listener.accept().unwrap().0;
                    relay(from_client, to_server)
                })
            },
        );
        assert_eq!(accepted.unwrap(), Some(5));
        said
    }

    /// Carries what both say until the client is silent; what the client has said.
    fn relay(mut client: TcpStream, mut server: TcpStream) -> Vec<u8> {
        thread::scope(|scope| {
            let (mut from_server, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            scope.spawn(move || std::io::copy(&mut from_server, &mut to_client));
            let mut said = Vec::new();
            let mut piece = [0; 256];
            while let Ok(count @ 1..) = client.read(&mut piece) {
                said.extend(&piece[..count]);
                server.write_all(&piece[..count]).unwrap();
            }
            let _ = server.shutdown(Shutdown::Both);
            said
        })
    }

    fn all_of(stream: &mut TcpStream) -> Vec<u8> {
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    #[test]
    fn what_was_said_in_another_session_is_worth_nothing() {
        let ours = secret("ours");
        let said = recorded(&ours);
        let (handshake, frame) = said.split_at(HELLO_BYTES + TAG_BYTES);
        assert_eq!(frame.len(), 2 + 8 + TAG_BYTES);
        // From its beginning: the server shows its nonce and no proof.
        let (refused, answer) = with_server(&ours, LONG, refusal, |mut stream| {
            stream.write_all(handshake).unwrap();
            let _ = stream.write_all(frame);
            all_of(&mut stream)
        });
        assert_eq!(refused, Some(ErrorKind::PermissionDenied));
        assert!(answer.len() <= HELLO_BYTES);
        // A message of it in a session that is right.
        let (received, _) = with_server(
            &ours,
            LONG,
            |accepted| accepted.unwrap().1.receive::<u64>(),
            |stream| {
                let mut raw = stream.try_clone().unwrap();
                let _halves = connect(stream, &ours, Instant::now() + LONG).unwrap();
                raw.write_all(frame).unwrap();
            },
        );
        assert!(received.is_err(), "{received:?}");
    }

    #[test]
    fn a_frame_that_was_changed_or_repeated_is_refused() {
        let ours = secret("ours");
        for repeat in [false, true] {
            let (accepted, ()) = with_server(
                &ours,
                LONG,
                |accepted| accepted,
                |stream| {
                    let mut raw = stream.try_clone().unwrap();
                    let (sender, _receiver) = connect(stream, &ours, Instant::now() + LONG).unwrap();
                    let mut frame = vec![8, 0];
                    frame.extend(5u64.to_le_bytes());
                    let tag = sender.tag_of(&frame);
                    frame.extend(tag);
                    if repeat {
                        raw.write_all(&frame).unwrap();
                    } else {
                        frame[2] ^= 1;
                    }
                    raw.write_all(&frame).unwrap();
                },
            );
            let (_sender, mut receiver) = accepted.unwrap();
            if repeat {
                assert_eq!(receiver.receive::<u64>().unwrap(), Some(5));
            }
            assert!(receiver.receive::<u64>().is_err());
        }
    }
}

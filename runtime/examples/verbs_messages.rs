//! How long a request to a memory server's thread and its reply take over verbs, with one in flight; threads that poll, and
//! threads that sleep. `verbs_messages [ROUNDS]`; prints one JSON object a line.

use std::{sync::Arc, time::Instant};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{
        link::ListenOptions,
        verbs::{Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer},
    },
    messaging::{Channel, Kind, MessageServer, Priority, Request, Responder, ServeMessages, Service, Wait},
    ptr::ServerId,
    server::DEFAULT_REGION_BYTES,
};

const ECHO: Kind = Kind(1);

struct Echo;

impl Service for Echo {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        reply.send_words(request.words());
    }
}

async fn measure(channel: &Channel, wait: Wait, words: usize, rounds: usize) -> Result<(), Error> {
    let params = vec![7; words];
    let mut times_ns = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        channel.request_words(ECHO, &params, Priority::Latency).await?;
        times_ns.push(begun.elapsed().as_nanos() as u64);
    }
    times_ns.sort_unstable();
    let at = |share: f64| times_ns[((times_ns.len() - 1) as f64 * share) as usize];
    println!(
        r#"{{"name":"echo","wait":"{wait:?}","bytes":{},"ops":{rounds},"p50_ns":{},"p99_ns":{},"max_ns":{}}}"#,
        words * 8,
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}

fn main() -> Result<(), Error> {
    let rounds = std::env::args().nth(1).and_then(|rounds| rounds.parse().ok()).unwrap_or(1000);
    let secret = Secret::random();
    let options = VerbsServeOptions {
        bytes: DEFAULT_REGION_BYTES / 256,
        listen: ([127, 0, 0, 1], 0).into(),
        ..VerbsServeOptions::new(secret.clone())
    };
    let server = VerbsServer::start(&options)?;
    let id = ServerId::new(0).expect("0 is a number of a server");
    let fabric = VerbsFabric::connect(&VerbsOptions::new([server.address().to_string()], secret))?;
    let compute = ComputeServer::join(Arc::new(fabric), ComputeOptions::default())?;
    for wait in [Wait::Poll, Wait::Event] {
        let serve = ServeMessages { wait, ..ServeMessages::default() };
        let listener = server.listen(&ListenOptions::default())?;
        let messages = MessageServer::start(listener, &serve, |_| Ok(Box::new(Echo)))?;
        let worker = compute.worker()?;
        worker.block_on(async {
            let channel = worker.channel(id).await?;
            for words in [1, 64, 1024] {
                measure(&channel, wait, words, rounds).await?;
            }
            Ok::<(), Error>(())
        })?;
        println!("{:?}", messages.counts());
    }
    Ok(())
}

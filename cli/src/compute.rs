//! A compute process: obeys orders from standard input (`protocol.rs`).

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;

use crate::host::Workers;
use crate::protocol::{Answer, Order, read_message, write_message};

/// Obeys orders until the input ends. An error is told to the bench, which reports it; the answer says whether all went
/// well, for the exit status.
pub(crate) fn obey(input: &mut impl BufRead, output: &mut impl Write, stop: &Arc<AtomicBool>) -> anyhow::Result<bool> {
    let result = obey_until_error(input, output, stop);
    if let Err(error) = &result {
        write_message(output, &Answer::Failed { error: format!("{error:#}") })?;
    }
    Ok(result.is_ok())
}

fn obey_until_error(input: &mut impl BufRead, output: &mut impl Write, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let Some(order) = read_message(input)? else { return Ok(()) };
    let Order::Start { plan, process, place } = order else { bail!("the first order must be to start") };
    let mut workers = Workers::start(*plan, process, &place, stop)?;
    write_message(output, &Answer::Ready)?;
    while let Some(order) = read_message(input)? {
        let answer = match order {
            Order::Start { .. } => bail!("started twice"),
            Order::Prepare { phase } => {
                workers.prepare(&phase)?;
                Answer::Ready
            }
            Order::Go => {
                let (nanoseconds, tally) = workers.go()?;
                Answer::Done { nanoseconds, tally: Box::new(tally) }
            }
        };
        write_message(output, &answer)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_order_is_to_start() {
        let mut input = Vec::new();
        write_message(&mut input, &Order::Go).unwrap();
        let mut output = Vec::new();
        assert!(!obey(&mut input.as_slice(), &mut output, &Arc::default()).unwrap());
        let answer: Option<Answer> = read_message(&mut output.as_slice()).unwrap();
        assert!(matches!(&answer, Some(Answer::Failed { error }) if error.contains("must be to start")), "{answer:?}");
        assert!(obey(&mut &[][..], &mut output, &Arc::default()).unwrap());
    }
}

//! A compute process: obeys orders from standard input (`protocol.rs`).

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;

use crate::program::{Programs, find};
use crate::protocol::{Answer, Order, read_message, write_message};

/// Obeys orders until the input ends. An error is told to the bench, which reports it; the answer says whether all went
/// well, for the exit status.
pub(crate) fn obey(
    programs: Programs<'_>,
    input: &mut impl BufRead,
    output: &mut impl Write,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<bool> {
    let result = obey_until_error(programs, input, output, stop);
    if let Err(error) = &result {
        write_message(output, &Answer::Failed { error: format!("{error:#}") })?;
    }
    Ok(result.is_ok())
}

/// From now on a panic of any thread ends the process, and the bench is told why. What the thread had locked stays locked:
/// those that wait for it would wait for ever, and so would the bench.
pub(crate) fn end_with_a_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        let thread = std::thread::current();
        let error = format!("{} panicked; what it said is above", thread.name().unwrap_or("a thread"));
        // Nothing is left to be done if nobody listens.
        let _ = write_message(&mut std::io::stdout(), &Answer::Failed { error });
        std::process::exit(101);
    }));
}

fn obey_until_error(
    programs: Programs<'_>,
    input: &mut impl BufRead,
    output: &mut impl Write,
    stop: &Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let Some(order) = read_message(input)? else { return Ok(()) };
    let Order::Start { plan, process, place } = order else { bail!("the first order must be to start") };
    let mut workers = find(programs, &plan.structure)?.start(*plan, process, &place, stop)?;
    write_message(output, &Answer::Joined { incarnation: workers.incarnation() })?;
    while let Some(order) = read_message(input)? {
        let answer = match order {
            Order::Start { .. } => bail!("started twice"),
            Order::Prepare { phase } => {
                workers.prepare(&phase)?;
                Answer::Ready
            }
            Order::Flush => Answer::Flushed { tally: Box::new(workers.flush()?) },
            Order::Go => {
                let mut tell = |ops| write_message(output, &Answer::Progress { ops });
                let (nanoseconds, tally) = workers.go(&mut tell)?;
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
        assert!(!obey(&[], &mut input.as_slice(), &mut output, &Arc::default()).unwrap());
        let answer: Option<Answer> = read_message(&mut output.as_slice()).unwrap();
        assert!(matches!(&answer, Some(Answer::Failed { error }) if error.contains("must be to start")), "{answer:?}");
        assert!(obey(&[], &mut &[][..], &mut output, &Arc::default()).unwrap());
    }
}

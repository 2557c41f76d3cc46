//! Several benches on one cluster at the same time.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use crate::{Cluster, PROGRAM, Said, Server, farlink, named};

impl Cluster {
    fn start_bench(&self, options: &str) -> Child {
        Command::new(PROGRAM)
            .args(["bench", "--json", "--connect", &self.at()])
            .args(options.split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn bench(&self, options: &str) -> Said {
        self.start_bench(options).wait_with_output().unwrap().into()
    }
}

/// One loads it. The other is told who does; or it finds all there, if it came late enough.
#[test]
fn of_two_that_load_one_structure_one_is_refused() {
    let cluster = Cluster::start();
    for (number, access) in ["one-sided", "one-sided --load insert", "cached", "cached-inner"].iter().enumerate() {
        let options = format!("--name n{number} --keys 20000 --mix c --ops 2000 --access {access}");
        let both = [(); 2].map(|()| cluster.start_bench(&options));
        let both = both.map(|bench| Said::from(bench.wait_with_output().unwrap()));
        assert!(both.iter().any(|said| said.ok), "{access}: {}\n{}", both[0].errors, both[1].errors);
        for said in both.into_iter().filter(|said| !said.ok) {
            // While it runs, or where its whole run fell between two looks of the other.
            let is_named =
                ["by compute server ", "loaded by somebody else"].iter().any(|who| said.errors.contains(who));
            assert!(is_named && !said.errors.contains("broken"), "{}", said.errors);
        }
    }
    let said = farlink(&["check", "--connect", &cluster.at()]).must_hold();
    assert_eq!(said.out.matches("entries 20000,").count(), 4, "{}", said.out);
}

#[test]
fn who_changes_a_structure_is_named_to_who_uses_it_meanwhile() {
    let cluster = Cluster::start();
    let mut writer = cluster.start_bench("--keys 2000 --read 99 --insert 1 --workers 1 --latency 20us --seconds 60");
    let mut rows = BufReader::new(writer.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(rows.any(|row| row.contains("\"memory\"")), "the bench ended early");
    let problem = loop {
        assert!(writer.try_wait().unwrap().is_none(), "the bench ended early");
        // Until it has inserted some meanwhile.
        let said = cluster.bench("--keys 2000 --mix c --ops 2000");
        // A check in the midst of a split may fail before.
        let rows = if said.ok { Vec::new() } else { said.json() };
        if let Some(problem) = named(&rows, "entries").first().and_then(|row| row["problem"].as_str()) {
            break problem.to_owned();
        }
    };
    assert!(problem.contains("may have changed `bench` meanwhile, too, which may be why"), "{problem}");
    let more = cluster.bench("--keys 3000 --mix c --ops 100");
    let who = "`bench` is being loaded or used by compute server ";
    more.must_fail_with(&[who, "wait until that is over", "lacks key"]);
    assert!(!Server(writer).stop(libc::SIGTERM).success());
    farlink(&["check", "--connect", &cluster.at()]).must_hold();
}

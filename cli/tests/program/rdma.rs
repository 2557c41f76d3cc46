//! Over RDMA, where there is a device.

#[cfg(not(feature = "verbs"))]
use crate::farlink;

#[cfg(not(feature = "verbs"))]
#[test]
fn without_rdma_the_program_says_how_to_build_it() {
    for args in [
        &["devices"][..],
        &["serve", "--fabric", "verbs"],
        &["check", "--connect", "verbs://127.0.0.1:7471", "--secret-file", "/dev/null"],
    ] {
        farlink(args).must_fail_with(&["built without RDMA", "--features verbs"]);
    }
}

#[cfg(feature = "verbs")]
mod over_rdma {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Child, Command, Stdio};

    use crate::{PROGRAM, Said, farlink};

    /// A memory server, which is killed with this.
    struct Server {
        process: Child,
        address: String,
        /// What it printed before it was ready.
        said: Vec<String>,
    }

    impl Server {
        fn start(args: &[&str]) -> Self {
            let mut process = Command::new(PROGRAM)
                .args(["serve", "--fabric", "verbs", "--bytes", "32MiB", "--listen", "127.0.0.1:0"])
                .args(args)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = Vec::new();
            for line in BufReader::new(process.stdout.take().unwrap()).lines() {
                said.push(line.unwrap());
                if said[said.len() - 1].ends_with(" ready") {
                    break;
                }
            }
            let address = said.iter().find_map(|line| line.split_once("verbs://")).expect("it listens somewhere").1;
            Self { address: address.to_owned(), process, said }
        }

        fn kill(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    fn has_device() -> bool {
        let has = farlink(&["devices", "--json"]).out.contains(r#""state":"active""#);
        let required = std::env::var_os("FARLINK_REQUIRE_VERBS").is_some_and(|value| value == "1");
        assert!(has || !required, "FARLINK_REQUIRE_VERBS is 1, and there is no RDMA device with an active port");
        if !has {
            println!("skipped: there is no RDMA device with an active port (`farlink devices`)");
        }
        has
    }

    #[test]
    fn two_servers_a_bench_and_a_check() {
        if !has_device() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let write = |name: &str, secret: &str| {
            use std::os::unix::fs::OpenOptionsExt as _;
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path(name)).unwrap();
            file.write_all(secret.as_bytes()).unwrap();
        };
        write("secret", "two servers and their secret\n");
        write("wrong", "another secret of good length\n");
        let secret = path("secret");
        let servers: Vec<Server> = ["0", "1"]
            .map(|server| Server::start(&["--server", server, "--servers", "2", "--secret-file", &secret]))
            .into();
        let connect = format!("verbs://{},{}", servers[1].address, servers[0].address);
        let at = ["--connect", &connect, "--secret-file", &secret];
        let run = |args: &[&str]| {
            let all: Vec<&str> = args[..1].iter().chain(&at).chain(&args[1..]).copied().collect();
            farlink(&all)
        };
        let args = ["bench", "--keys", "5000", "--ops", "2000", "--mix", "a", "--in-flight", "1,8", "--json"];
        let rows = run(&args).must_hold().json();
        let measured = rows.iter().find(|row| row["name"] == "ycsb-a").unwrap();
        assert!(
            measured["reads_per_op"].as_f64().unwrap() >= 1.0 && measured["atomics_per_op"].as_f64().unwrap() > 0.5
        );
        assert!(rows.iter().filter(|row| row.get("ok").is_some()).all(|row| row["ok"] == true));
        run(&["bench", "--keys", "5000", "--ops", "2000", "--mix", "c", "--access", "cached", "--cache", "8%"])
            .must_hold();
        assert!(run(&["check"]).must_hold().out.contains("check btree: ok"));
        farlink(&["check", "--connect", &connect, "--secret-file", &path("wrong")]).must_fail_with(&["another secret"]);
        let one = format!("verbs://{}", servers[0].address);
        farlink(&["check", "--connect", &one, "--secret-file", &secret]).must_fail_with(&["2 memory servers"]);
        run(&["bench", "--latency", "2us"]).must_fail_with(&["imitate a network"]);
    }

    #[test]
    fn a_server_without_a_secret_makes_one_and_tells_it() {
        if !has_device() {
            return;
        }
        let server = Server::start(&[]);
        let (_, secret) = server.said[0].split_once("FARLINK_SECRET=").unwrap();
        let connect = format!("verbs://{}", server.address);
        let check = |secret: Option<&str>| -> Said {
            let mut command = Command::new(PROGRAM);
            command.args(["check", "--connect", &connect]).env_remove("FARLINK_SECRET");
            command.envs(secret.map(|secret| ("FARLINK_SECRET", secret))).output().unwrap().into()
        };
        assert_eq!(check(Some(secret)).must_hold().out, "there are no structures in this cluster\n");
        check(None).must_fail_with(&["secret is missing", "FARLINK_SECRET"]);
        check(Some("short")).must_fail_with(&["5 bytes"]);
    }

    #[test]
    fn a_bench_whose_server_is_killed_says_so_and_ends() {
        if !has_device() {
            return;
        }
        let mut server = Server::start(&[]);
        let (_, secret) = server.said[0].split_once("FARLINK_SECRET=").unwrap();
        let connect = format!("verbs://{}", server.address);
        let args = "--keys 2000 --seconds 600 --mix a --in-flight 4";
        let mut bench = Command::new(PROGRAM)
            .args(["bench", "--connect", &connect])
            .args(args.split(' '))
            .env("FARLINK_SECRET", secret)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It says so once the tree is loaded, just before the mix.
        let mut out = BufReader::new(bench.stdout.take().unwrap()).lines();
        assert!(out.by_ref().map_while(Result::ok).any(|line| line.contains("after load")), "the bench ended early");
        server.kill();
        let said: Said = bench.wait_with_output().unwrap().into();
        said.must_fail_with(&["is lost"]);
    }
}

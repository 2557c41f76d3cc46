use std::ffi::OsString;

use farlink_tests::settings::Arguments;

fn parse(words: &[&str]) -> anyhow::Result<Arguments> {
    Arguments::parse(words.iter().map(OsString::from))
}

#[test]
fn pairs_are_taken_and_nothing_else_is_accepted() {
    let mut arguments = parse(&["--seconds", "2.5", "--keys", "7"]).unwrap();
    let (mut seconds, mut keys, mut other) = (1.0, 1u32, 3u32);
    arguments.take("seconds", &mut seconds).unwrap();
    arguments.take("keys", &mut keys).unwrap();
    arguments.take("other", &mut other).unwrap();
    assert_eq!((seconds, keys, other), (2.5, 7, 3));
    arguments.finish().unwrap();
    for wrong in [&["seconds"][..], &["--seconds"], &["--a", "1", "--a", "2"]] {
        assert!(parse(wrong).is_err(), "{wrong:?}");
    }
    assert!(parse(&["--sekonds", "1"]).unwrap().finish().is_err());
    assert!(parse(&["--keys", "x"]).unwrap().take("keys", &mut keys).is_err());
}

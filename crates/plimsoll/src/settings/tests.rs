//! The source of each value, and the order of the sources.

use plimsoll_device::KvDtype;

use super::*;

fn given(args: &[&str], variables: &[(&str, &str)]) -> anyhow::Result<(Cli, String)> {
    let args = ["plimsoll"].iter().chain(args).map(OsString::from).collect();
    let variables = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    read(args, &variables)
}

fn serve(cli: Cli) -> crate::args::ServeArgs {
    match cli.command {
        crate::args::Command::Serve(serve) => serve,
        other => panic!("{other:?}"),
    }
}

fn file(text: &str) -> (std::path::PathBuf, impl Drop) {
    struct Gone(std::path::PathBuf);
    impl Drop for Gone {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("plimsoll-settings-{}-{next}.toml", std::process::id()));
    std::fs::write(&path, text).unwrap();
    (path.clone(), Gone(path))
}

#[test]
fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
    let (path, _gone) = file(
        "port = 1\nhost = '0.0.0.0'\ndrain_seconds = 7\nserved-model-name = ['a', 'b']\nelastic = true\nmodel = 'from-file'\n",
    );
    let path = path.to_str().unwrap();
    let variables = [("PLIMSOLL_PORT", "2"), ("PLIMSOLL_DRAIN_SECONDS", "8"), ("PLIMSOLL_CACHE", "/x")];
    let (cli, page) = given(&["serve", "--config", path, "--port", "3"], &variables).unwrap();
    let args = serve(cli);
    assert_eq!((args.port, args.drain_seconds, args.host.as_str()), (3, 8, "0.0.0.0"));
    assert_eq!((args.model.as_str(), args.served_model_name.len()), ("from-file", 2));
    assert!(args.engine.elastic);
    for (line, origin) in [
        ("port = 3 ", "flag"),
        ("drain-seconds = 8 ", "environment"),
        ("host = \"0.0.0.0\" ", "file"),
        ("served-model-name = [\"a\", \"b\"] ", "file"),
        ("elastic = true ", "file"),
        ("max-connections = 256 ", "default"),
        ("# memory-budget is not set ", "default"),
    ] {
        let found = page.lines().find(|found| found.starts_with(line)).unwrap_or_else(|| panic!("{line}: {page}"));
        assert!(found.ends_with(&format!("# {origin}")), "{found}");
    }
    // The printed page is a configuration file.
    let (again, _gone) = file(&page);
    let (cli, _) = given(&["serve", "--config", again.to_str().unwrap()], &[]).unwrap();
    assert_eq!(serve(cli).port, 3);
    let (cli, _) = given(&["serve"], &[("PLIMSOLL_CONFIG", path), ("PLIMSOLL_ELASTIC", "false")]).unwrap();
    let args = serve(cli);
    assert_eq!((args.port, args.engine.elastic), (1, false));
}

#[test]
fn what_is_no_setting_is_refused_by_name() {
    let refused = |text: &str, variables: &[(&str, &str)]| {
        let (path, _gone) = file(text);
        given(&["serve", "--config", path.to_str().unwrap()], variables).unwrap_err().to_string()
    };
    assert!(refused("prot = 1", &[]).contains("`prot` (did you mean `port`?)"));
    assert!(refused("", &[("PLIMSOLL_DRAIN_SECOND", "1")]).contains("PLIMSOLL_DRAIN_SECOND is set"));
    assert!(refused("port = 'x'", &[]).contains("toml: port"), "{}", refused("port = 'x'", &[]));
    assert!(refused("", &[("PLIMSOLL_PORT", "x")]).contains("set by PLIMSOLL_PORT"));
    assert!(refused("port = [1, 2]", &[]).contains("not a list"));
    assert!(refused("elastic = 'maybe'", &[]).contains("neither true nor false"));
    assert!(refused("[port]\nx = 1", &[]).contains("port"));
    assert!(refused("port = 1\nport = 2", &[]).contains("line 2: "));
    assert!(refused("drain-seconds = 1\ndrain_seconds = 2", &[]).contains("twice"));
    assert!(refused("config = 'x'", &[]).contains("`config`"));
    let missing = given(&["serve", "--config", "/nowhere/at/all.toml"], &[]).unwrap_err();
    assert!(format!("{missing:#}").contains("/nowhere/at/all.toml"), "{missing:#}");
    // Variables that Kubernetes sets are ignored.
    let kubernetes = [
        ("PLIMSOLL_SERVICE_HOST", "10.0.0.1"),
        ("PLIMSOLL_PORT", "tcp://10.0.0.1:8000"),
        ("PLIMSOLL_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("PLIMSOLL_METRICS_SERVICE_HOST", "10.0.0.1"),
        ("PLIMSOLL_METRICS_SERVICE_PORT_HTTP", "9000"),
    ];
    assert!(given(&["serve"], &kubernetes).is_ok());
}

#[test]
fn what_a_flag_needs_may_come_from_elsewhere() {
    let content = ["serve", "m", "--record-content"];
    let record = |variables: &[(&str, &str)], file: &[&str]| {
        given(&[&content[..], file].concat(), variables).map(|(cli, _)| serve(cli).record.unwrap())
    };
    assert_eq!(record(&[("PLIMSOLL_RECORD", "/x")], &[]).unwrap(), Path::new("/x"));
    let (path, _gone) = file("record = '/y'\n");
    assert_eq!(record(&[], &["--config", path.to_str().unwrap()]).unwrap(), Path::new("/y"));
    // If no source sets --record, the error names the flag and the setting that needs it.
    let error = given(&["serve", "m"], &[("PLIMSOLL_RECORD_CONTENT", "1")]).unwrap_err().to_string();
    assert!(error.contains("--record <FILE>") && error.contains("set by PLIMSOLL_RECORD_CONTENT"), "{error}");
}

#[test]
fn what_cannot_stand_beside_a_flag_gives_way_to_it() {
    let models = |args: &[&str], variables: &[(&str, &str)]| {
        let serve = given(&[&["serve"], args].concat(), variables).map(|(cli, _)| serve(cli))?;
        Ok::<_, anyhow::Error>((serve.model, serve.models.map(|path| path.display().to_string())))
    };
    let of = |model: &str, models: Option<&str>| (model.to_owned(), models.map(str::to_owned));
    assert_eq!(models(&["m"], &[("PLIMSOLL_MODELS", "f")]).unwrap(), of("m", None));
    let default = plimsoll_hub::DEFAULT_MODEL;
    assert_eq!(models(&["--models", "f"], &[("PLIMSOLL_MODEL", "m")]).unwrap(), of(default, Some("f")));
    let (path, _gone) = file("model = 'from-file'\n");
    let config = ["--config", path.to_str().unwrap()];
    assert_eq!(models(&config, &[("PLIMSOLL_MODELS", "f")]).unwrap(), of(default, Some("f")), "the environment wins");
    let error = models(&[], &[("PLIMSOLL_MODELS", "f"), ("PLIMSOLL_MODEL", "m")]).unwrap_err().to_string();
    assert!(error.contains("cannot be used with") && error.contains("PLIMSOLL_MODELS"), "{error}");
    // Either of the two may declare the conflict; a setting that is off conflicts with none.
    let plan =
        |args: &[&str], variables: &[(&str, &str)]| match given(&[&["plan"], args].concat(), variables)?.0.command {
            Command::Plan(plan) => Ok::<_, anyhow::Error>((plan.users, plan.k8s.k8s, plan.json)),
            other => panic!("{other:?}"),
        };
    assert_eq!(plan(&["--k8s"], &[("PLIMSOLL_USERS", "4")]).unwrap(), (None, true, false));
    assert_eq!(plan(&["--users", "4"], &[("PLIMSOLL_K8S", "true")]).unwrap(), (Some(4), false, false));
    // A setting that gave way drops no other: PLIMSOLL_MODELS gives way to `m`, and `users` stays.
    let (path, _gone) = file("users = 4\n");
    let config = ["m", "--config", path.to_str().unwrap()];
    assert_eq!(plan(&config, &[("PLIMSOLL_MODELS", "f")]).unwrap(), (Some(4), false, false));
    let (path, _gone) = file("json = true\n");
    let json = |k8s| plan(&["--config", path.to_str().unwrap()], &[("PLIMSOLL_K8S", k8s)]).unwrap();
    assert_eq!([json("true"), json("false")], [(None, true, false), (None, false, true)]);
}

#[test]
fn keys_come_from_everywhere_and_are_shown_nowhere() {
    let (cli, page) = given(&["serve"], &[("PLIMSOLL_API_KEY", "secret-one,secret-two")]).unwrap();
    assert_eq!(serve(cli).http.access.keys.api_key, ["secret-one", "secret-two"]);
    assert!(!page.contains("secret") && page.contains("not shown"), "{page}");
}

#[test]
fn clients_send_the_first_key_of_flag_file_or_environment() {
    let url = ["--url", "http://a"];
    let first = |words: &[&str], variables: &[(&str, &str)]| {
        let keys = match given(&[words, &url].concat(), variables).unwrap().0.command {
            Command::Bench(bench) => bench.keys,
            Command::Soak(soak) => soak.keys,
            Command::Replay(replay) => replay.http.access.keys,
            other => panic!("{other:?}"),
        };
        keys.first().unwrap()
    };
    let (path, _gone) = file("# ours\nfrom-file\n");
    let path = path.to_str().unwrap();
    for client in [&["bench"][..], &["soak"], &["replay", "trace.jsonl"]] {
        let with = |flag, value| [client, &[flag, value]].concat();
        let key = ("PLIMSOLL_API_KEY", "one,two");
        assert_eq!(first(client, &[]), None);
        assert_eq!(first(client, &[("PLIMSOLL_API_KEY", ""), ("PLIMSOLL_PORT", "x")]), None, "others are not read");
        assert_eq!(first(client, &[key]).as_deref(), Some("one"));
        assert_eq!(first(&with("--api-key", "three,four"), &[key]).as_deref(), Some("three"), "a flag wins");
        assert_eq!(first(&with("--api-key-file", path), &[key]).as_deref(), Some("from-file"), "either of them");
        assert_eq!(first(client, &[("PLIMSOLL_API_KEY_FILE", path)]).as_deref(), Some("from-file"));
    }
}

/// The plan must say what the server will do, so both read the same file; each takes its part.
#[test]
fn one_file_serves_both_commands() {
    let (path, _gone) = file("port = 9\nmax-body-bytes = 1000\nmodel = 'tiny'\n");
    let (cli, _) = given(&["plan", "--config", path.to_str().unwrap()], &[]).unwrap();
    match cli.command {
        crate::args::Command::Plan(plan) => {
            assert_eq!((plan.http.max_body_bytes, plan.model.as_str()), (1000, "tiny"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_model_has_its_own_flags_after_those_for_all() {
    let (cli, _) = given(
        &["serve", "--kv-dtype", "q8", "--elastic", "--memory-budget", "1GiB", "--models", "x.toml", "--port", "1"],
        &[("PLIMSOLL_MAX_WAITING", "7")],
    )
    .unwrap();
    let inherited = serve(cli).inherited;
    let (path, _gone) = file(
        "[[models]]\nname = 'b'\nmodel = 'one'\nkv-dtype = 'f32'\nelastic = false\nserved_model_name = ['x', 'y']\n\
         [[models]]\nname = 'a'\nmodel = 'two'\nidle-seconds = 9\nmemory-budget = '10MiB'\n",
    );
    let models = crate::models_file::read(&path, &inherited).unwrap();
    let [(first, one), (second, two)] = &models[..] else { panic!("{models:?}") };
    assert_eq!((first.as_str(), second.as_str()), ("b", "a"), "in the order of the file");
    assert_eq!((one.model.as_str(), one.engine.elastic, one.engine.max_waiting), ("one", false, 7));
    assert_eq!((one.served_model_name.len(), one.idle_seconds, one.engine.memory_budget.is_none()), (2, None, true));
    assert_eq!([one.engine.kv_dtype, two.engine.kv_dtype], [Some(KvDtype::F32), Some(KvDtype::Q8)]);
    assert_eq!((two.engine.elastic, two.idle_seconds, two.engine.memory_budget.is_some()), (true, Some(9), true));
}

#[test]
fn an_ipv6_host_may_stand_in_brackets_wherever_it_is_set() {
    let host = |args: &[&str], variables: &[(&str, &str)]| given(args, variables).map(|(cli, _)| serve(cli).host);
    assert_eq!(host(&["serve", "--host", "[::1]"], &[]).unwrap(), "::1");
    assert_eq!(host(&["serve", "--host", "::1"], &[]).unwrap(), "::1");
    assert_eq!(host(&["serve"], &[("PLIMSOLL_HOST", "[::]")]).unwrap(), "::");
    let (path, _gone) = file("host = '[fe80::1]'\n");
    assert_eq!(host(&["serve", "--config", path.to_str().unwrap()], &[]).unwrap(), "fe80::1");
    let doctor = given(&["doctor", "--host", "[::1]"], &[]).unwrap().0.command;
    assert!(matches!(&doctor, crate::args::Command::Doctor(args) if args.host == "::1"), "{doctor:?}");
    for bad in ["[::1", "::1]", "[::1]:8000", "[localhost]", "[]", "[[::1]]"] {
        // A value that clap refuses ends the process: the parser of the flag is asked itself.
        let words = crate::args::values::host(bad).unwrap_err();
        assert!(words.contains("give one as [::1]"), "{bad}: {words}");
    }
}

#[test]
fn sizes_have_units_and_a_disk_has_at_least_a_byte() {
    use crate::args::values::{size, some_size};
    assert_eq!(["0", "0MiB", "1000", "64MiB", "1.5g"].map(size), [0, 0, 1000, 64 << 20, 3 << 29].map(Ok));
    for bad in ["", "-1", "64XB", "50%"] {
        assert!(size(bad).unwrap_err().contains("a number and a unit"), "{bad}");
    }
    assert!(size("1025TiB").unwrap_err().contains("1125899906842624"));
    assert_eq!((some_size("1KiB"), some_size("0KiB").is_err()), (Ok(1024), true));
}

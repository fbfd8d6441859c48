//! `plan --k8s`: the manifest is YAML, its memory limit is the plan's, and its container runs a server that fits into the limit.

use serde::Deserialize;
use serde_json::Value;
use serde_yaml_ng::Deserializer;

use crate::limit::Cage;
use crate::product::{Finished, Server, fixture, plimsoll, run};

/// The Deployment and the Service.
fn manifest(args: &[&str]) -> [Value; 2] {
    parse(&run(&[&["plan"], args, &["--k8s"]].concat()).good())
}

fn parse(text: &str) -> [Value; 2] {
    let documents = Deserializer::from_str(text).map(Value::deserialize);
    let documents: Vec<_> = documents.collect::<Result<_, _>>().unwrap_or_else(|error| panic!("{error}: {text}"));
    documents.try_into().unwrap_or_else(|all| panic!("two documents: {all:?}"))
}

fn container(deployment: &Value) -> &Value {
    &deployment["spec"]["template"]["spec"]["containers"][0]
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

#[test]
fn the_limit_is_the_plan_and_three_percent_in_whole_mebibytes() {
    for model in ["llama", "qwen3-next", "bert"].map(fixture) {
        let model = model.to_str().unwrap();
        let flags = [model, "--memory-budget", "700MiB", "--threads", "2"];
        let [deployment, service] = manifest(&flags);
        // The plan is for the instruction set that takes the most memory, because a pod's node may have it.
        let plan = run(&[&["plan"], &flags[..], &["--json", "--isa", "amx"]].concat()).good();
        let total = serde_json::from_str::<Value>(&plan).unwrap()["total"].as_u64().unwrap();
        let mebibytes = (total + total * 3 / 100).div_ceil(1 << 20);
        let resources = &container(&deployment)["resources"];
        for kind in ["requests", "limits"] {
            assert_eq!(resources[kind]["memory"].as_str(), Some(&*format!("{mebibytes}Mi")), "{model}");
            assert_eq!(resources[kind]["cpu"].as_u64(), Some(2), "{model}");
        }
        let args = texts(&container(&deployment)["args"]);
        assert!(args.iter().all(|arg| !arg.contains("memory-budget")), "the cgroup is the budget: {args:?}");
        let labels = &deployment["spec"]["template"]["metadata"]["labels"];
        assert_eq!(&deployment["spec"]["selector"]["matchLabels"], labels);
        assert_eq!(&service["spec"]["selector"], labels);
        assert_eq!(service["kind"].as_str(), Some("Service"));
    }
}

#[test]
fn probes_drain_and_settings_are_the_servers_and_keys_are_not_shown() {
    let llama = fixture("llama");
    let mut command = plimsoll(["plan", llama.to_str().unwrap(), "--k8s", "--drain-seconds", "50"]);
    command.env("PLIMSOLL_API_KEY", "a-secret").env("PLIMSOLL_KV_DTYPE", "q8");
    command.env("PLIMSOLL_POOLING", "last").args(["--served-model-name", "house", "--tool-call-parser", "hermes"]);
    let text = Finished::of(command.args(["--replicas", "3"]).output().unwrap()).good();
    assert!(!text.contains("a-secret"), "{text}");
    let [deployment, _] = &parse(&text);
    assert_eq!(deployment["spec"]["replicas"].as_u64(), Some(3));
    let pod = &deployment["spec"]["template"]["spec"];
    assert!(pod["terminationGracePeriodSeconds"].as_u64().unwrap() > 5 + 50, "preStop and drain fit into it");
    let inside = container(deployment);
    assert_eq!(texts(&inside["lifecycle"]["preStop"]["exec"]["command"]), ["sleep", "5"]);
    let args = texts(&inside["args"]);
    assert_eq!(args[..2], ["serve", "/models/llama"]);
    for given in [
        "--drain-seconds=50",
        "--kv-dtype=q8",
        "--pooling=last",
        "--served-model-name=house",
        "--tool-call-parser=hermes",
    ] {
        assert!(args.contains(&given), "{given}: {args:?}");
    }
    // The probes' paths exist, and the server answers them without a key.
    let server = Server::start_model(&llama, &["--max-total-token-num", "1024", "--api-key", "a-key-of-tests"]);
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        let path = inside[probe]["httpGet"]["path"].as_str().unwrap();
        assert_eq!(server.get(path).status, 200, "{probe}");
    }
}

#[test]
fn a_model_that_is_here_is_called_by_its_directory() {
    let mut command = plimsoll(["plan", ".", "--k8s"]);
    let text = Finished::of(command.current_dir(fixture("llama")).output().unwrap()).good();
    let [deployment, _] = &parse(&text);
    assert_eq!(texts(&container(deployment)["args"])[..2], ["serve", "/models/llama"]);
    assert_eq!(deployment["metadata"]["name"].as_str(), Some("plimsoll-llama"));
}

#[test]
fn the_servers_of_a_manifest_fit_into_its_limit() {
    for name in ["llama", "mtp-half", "bert"] {
        let model = fixture(name);
        let mut flags = vec![model.to_str().unwrap(), "--threads", "2", "--max-connections", "64"];
        if name == "mtp-half" {
            flags.extend(["--enable-mtp", "--running-max-req-size", "4"]);
        }
        let [deployment, _] = manifest(&flags);
        let inside = container(&deployment);
        let mebibytes = inside["resources"]["limits"]["memory"].as_str().unwrap().strip_suffix("Mi").unwrap();
        let limit = mebibytes.parse::<u64>().unwrap() << 20;
        let args = texts(&inside["args"]).into_iter().skip(2);
        let args: Vec<_> = ["serve", flags[0], "--port", "0"].into_iter().chain(args).collect();
        let Some(cage) = Cage::open(&format!("k8s-{name}-{}", std::process::id()), limit) else { return };
        let server = Server::try_start(cage.plimsoll(&args)).unwrap_or_else(|words| panic!("{args:?}: {words}"));
        let planned = server.memory()["planned_bytes"].as_u64().unwrap();
        assert!(planned <= limit && planned + planned * 4 / 100 + (1 << 20) >= limit, "{name}: {planned} of {limit}");
        drop(server);
        assert_eq!(cage.report()[2], 0, "{name}: nothing was killed");
    }
}

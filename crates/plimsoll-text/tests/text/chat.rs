//! Chat templates render what transformers renders, within limits on length, steps, output and recursion.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::common::{path, read};
use plimsoll_text::{ChatTemplate, Ending, TextError, chat_template_sources};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Template {
    template: String,
    conversations: Vec<Conversation>,
}

#[derive(Deserialize)]
struct Conversation {
    name: String,
    messages: Value,
    tools: Option<Value>,
    extra: Map<String, Value>,
    results: Vec<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    ending: Ending,
    text: Option<String>,
}

#[test]
fn renderings_equal_the_reference() {
    let templates: Vec<Template> = read("chat.json");
    assert!(templates.len() >= 7);
    for template in templates {
        let source = std::fs::read_to_string(path(&format!("templates/{}.jinja", template.template))).unwrap();
        let chat = ChatTemplate::new(&source, "<s>", "</s>").unwrap();
        for case in template.conversations {
            for expected in case.results {
                let ours = chat.render(&case.messages, case.tools.as_ref(), expected.ending, &case.extra);
                let name = format!("{} / {} / {:?}", template.template, case.name, expected.ending);
                match expected.text {
                    Some(text) => assert_eq!(ours.unwrap_or_else(|e| panic!("{name}: {e}")), text, "{name}"),
                    None => assert!(ours.is_err(), "{name} should fail, got {ours:?}"),
                }
            }
        }
    }
}

fn render(source: &str) -> Result<String, TextError> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    ChatTemplate::new(source, "<s>", "</s>")?.render(&messages, None, Ending::Open, &Map::new())
}

#[test]
fn a_refusal_carries_its_reason() {
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(error.to_string().contains("roles must alternate"), "{error}");
}

#[test]
fn a_template_that_reads_only_parts_gets_parts() {
    let source = "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}{% endfor %};{% endfor %}";
    let chat = ChatTemplate::new(source, "", "").unwrap();
    let mixed = json!([{"type": "image"}, {"type": "text", "text": "See?"}]);
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": mixed}, {"role": "x", "content": null}]);
    let text = chat.render(&messages, None, Ending::Closed, &Map::new()).unwrap();
    assert_eq!(text, "system:Be kind.;user:[image]See?;x:;");
}

#[test]
fn a_template_knows_tools_if_they_change_its_prompts() {
    let knows = |source: &str| ChatTemplate::new(source, "", "").unwrap().knows_tools();
    assert!(knows("{% if tools %}{{ tools | tojson }}{% endif %}"));
    assert!(knows("{% if tools %}Write calls as JSON.{% endif %}"));
    assert!(knows("{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"));
    assert!(knows("{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"));
    // Nothing shows that this template ignores tools.
    assert!(knows("{{ raise_exception('no such roles') }}{{ tools }}"));
    // The tools of a message, as in Phi-4-mini, are not the request's.
    assert!(!knows(
        "{% for m in messages %}{{ m.content }}{{ '<|tool|>' + m.tools + '<|/tool|>' if m.tools }}{% endfor %}"
    ));
    assert!(!knows("{% for m in messages %}{{ m.content }}{% endfor %}"));
}

#[test]
fn extras_cannot_replace_the_messages() {
    let chat = ChatTemplate::new("{{ messages[0].content }}{{ flag }}", "", "").unwrap();
    let extra = json!({"messages": [{"content": "forged"}], "flag": 7}).as_object().unwrap().clone();
    let text = chat.render(&json!([{"content": "real"}]), None, Ending::Closed, &extra).unwrap();
    assert_eq!(text, "real7");
}

#[test]
fn the_template_is_found_beside_the_tokenizer() {
    let sources = chat_template_sources(&path("byte_level")).unwrap().unwrap();
    assert_eq!((sources.default.as_str(), sources.tool_use), ("{{ messages }}", None));
    assert_eq!(chat_template_sources(&path("gpt2")).unwrap(), None);
}

/// Files of a model folder, and the reference's output of the templates in them.
#[derive(Deserialize)]
struct Named {
    files: BTreeMap<String, String>,
    without_tools: Option<String>,
    with_tools: Option<String>,
}

#[test]
fn of_several_templates_the_reference_s_is_taken() {
    for (index, case) in read::<Vec<Named>>("named.json").into_iter().enumerate() {
        let folder = std::env::temp_dir().join(format!("plimsoll-named-{}-{index}", std::process::id()));
        for (name, content) in &case.files {
            let file = folder.join(name);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, content).unwrap();
        }
        let sources = chat_template_sources(&folder).unwrap();
        let _ = std::fs::remove_dir_all(&folder);
        let template = sources.map(|sources| {
            let default = ChatTemplate::new(&sources.default, "", "").unwrap();
            match sources.tool_use {
                Some(source) => default.with_tool_use(ChatTemplate::new(&source, "", "").unwrap()),
                None => default,
            }
        });
        let taken = |tools| template.as_ref().map(|template| template.when(tools).source().to_owned());
        assert_eq!((taken(false), taken(true)), (case.without_tools, case.with_tools), "{:?}", case.files);
    }
}

#[test]
fn the_date_can_be_asked_for() {
    let text = render("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    assert!(text.len() == 10 && text.starts_with("20"), "{text}");
}

/// Templates that do not end, or that load other templates.
const REFUSED: &[(&str, &str)] = &[
    ("steps", "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"),
    ("output", "{% set s = 'a' * 1000000 %}{% for i in range(99) %}{{ s }}{% endfor %}"),
    (
        "captured output",
        "{% set s = 'a' * 1000000 %}{% for i in range(99) %}{% set x %}{{ s }}{% endset %}{% endfor %}",
    ),
    ("recursion of macros", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"),
    (
        "recursion of values",
        "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    ),
    ("a namespace in itself", "{% set n = namespace() %}{% set n.x = n %}{{ [n] }}"),
    ("other templates", "{% include 'x' %}"),
    ("blocks", "{% block x %}{% endblock %}"),
];

#[test]
fn templates_beyond_the_limits_fail_soon() {
    for (name, source) in REFUSED {
        let start = Instant::now();
        let result = render(source);
        assert!(result.is_err(), "{name}: {:?}", result.map(|text| text.len()));
        // The machine may be busy; without limits these would take ages.
        assert!(start.elapsed() < Duration::from_secs(20), "{name}: {:?}", start.elapsed());
    }
}

#[test]
fn literal_text_counts_as_output() {
    let source = format!("{{% for i in range(9999) %}}{}{{% endfor %}}", "x".repeat(100_000));
    assert!(matches!(render(&source), Err(TextError::TemplateLimit { .. })));
    let chat = ChatTemplate::new("{{ messages[0].content * 3 }}", "", "").unwrap().with_prompt_bytes_max(10);
    let messages = json!([{"content": "1234"}]);
    let error = chat.render(&messages, None, Ending::Closed, &Map::new()).unwrap_err();
    assert!(matches!(error, TextError::TemplateLimit { limit: 10, .. }), "{error}");
}

#[test]
fn nested_and_long_sources_are_refused() {
    for unit in ["(", "[", "{", "f("] {
        let source = format!("{{{{ {} }}}}", unit.repeat(10_000));
        assert!(ChatTemplate::new(&source, "", "").is_err(), "{unit}");
    }
    assert!(ChatTemplate::new(&"x".repeat(300 << 10), "", "").is_err());
}

/// A template that appends each message to a list does not nest lists as deep as the conversation is long.
#[test]
fn appended_lists_and_slices_are_no_deep_chains() {
    let source = "{% set ns = namespace(all=[], rest=messages) %}{% for m in messages %}\
        {% set ns.all = ns.all + [m.role] %}{% set ns.rest = ns.rest[1:] %}{% endfor %}{{ ns.all | length }} {{ ns.rest }}";
    let messages: Value = (0..5000).map(|_| json!({"role": "user", "content": "hi"})).collect();
    let chat = ChatTemplate::new(source, "", "").unwrap();
    assert_eq!(chat.render(&messages, None, Ending::Open, &Map::new()).unwrap(), "5000 []");
}

#[test]
fn long_conversations_stay_within_the_steps() {
    let source = std::fs::read_to_string(path("templates/think.jinja")).unwrap();
    let chat = ChatTemplate::new(&source, "", "").unwrap();
    let turn = |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "word ".repeat(200)});
    let messages: Value = (0..2000).map(turn).collect();
    let text = chat.render(&messages, None, Ending::Open, &Map::new()).unwrap();
    assert!(text.len() > 2_000_000);
}

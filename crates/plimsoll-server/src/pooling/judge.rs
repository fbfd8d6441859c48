//! Scores of how well texts fit each other, shared by reranking and scoring. A classifier reads both texts of a pair together, as does a
//! decoder that answers with "yes" or "no". An embedding model reads each text alone, and the cosine of the two embeddings is the score.

use std::sync::Arc;

use plimsoll_engine::{Embed, Pooling, Rank};

use super::cut::Cut;
use super::run::run;
use super::{Input, check_length, embedding, hold_answer, vector};
use crate::http::error::{ApiError, ApiResult};
use crate::state::config::Pooled;
use crate::state::model::ModelState;

/// Inputs for the engine, and the rule that turns their results into scores.
pub(crate) struct Judgement {
    pub inputs: Vec<Input>,
    /// For each pair the indices of its two inputs; none where each input is a pair.
    pairs: Option<Vec<(usize, usize)>>,
}

impl Judgement {
    /// Prepares the scores of `pairs` of texts, given as indices into `first` and `second`, the documents. Runs on a text worker.
    pub fn new(
        state: &ModelState,
        [(a, first), (b, second)]: [(&str, &[String]); 2],
        pairs: &[(usize, usize)],
        cut: Cut,
    ) -> ApiResult<Self> {
        if let Some(rank) = &state.served.pooled.rank {
            return Self::by_answer(state, rank, [(a, first), (b, second)], pairs, cut);
        }
        match state.served.engine.limits().labels {
            0 => Self::by_cosine(state, [(a, first), (b, second)], pairs, cut),
            1 => Self::by_classifier(state, [(a, first), (b, second)], pairs, cut),
            labels => {
                let message = format!("this model's classifier has {labels} classes: its pairs have no single score");
                Err(ApiError::unsupported("model", message))
            }
        }
    }

    fn by_cosine(
        state: &ModelState,
        texts: [(&str, &[String]); 2],
        pairs: &[(usize, usize)],
        cut: Cut,
    ) -> ApiResult<Self> {
        let embed = embedding(state)?;
        let mut inputs = Vec::new();
        for ((param, texts), cut) in texts.into_iter().zip([cut.of_others(), cut]) {
            for (i, text) in texts.iter().enumerate() {
                let ids = cut.encode(state, param, text, true)?;
                check_length(state, param, i, texts.len(), ids.len())?;
                inputs.push(Input { ids, embed });
            }
        }
        let after = texts[0].1.len();
        Ok(Self { inputs, pairs: Some(pairs.iter().map(|(a, b)| (*a, after + b)).collect()) })
    }

    fn by_answer(
        state: &ModelState,
        rank: &Rank,
        [(_, first), (param, second)]: [(&str, &[String]); 2],
        pairs: &[(usize, usize)],
        cut: Cut,
    ) -> ApiResult<Self> {
        let [head, tail] = &rank.around;
        let around = head.len() + tail.len();
        let limit = state.served.engine.limits().max_req_total_len as usize;
        // A token has a byte at least. A pair repeats its texts: the bytes of all pairs are charged before the first pair is made.
        let bytes = pairs.iter().map(|(a, b)| {
            let text = rank.fixed_bytes() + first[*a].len() + second[*b].len();
            text.min(limit) + around
        });
        let ids = size_of::<u32>() * bytes.sum::<usize>();
        let longest = |texts: &[String]| texts.iter().map(String::len).max().unwrap_or(0);
        let text = 2 * (rank.fixed_bytes() + longest(first)) + longest(second);
        let _held = hold_answer(state, param, (ids + text) as u64)?;
        let input = |(i, (a, b)): (usize, &(usize, usize))| {
            let own = cut.encode_behind(state, param, &rank.before_document(&first[*a]), &second[*b], around)?;
            check_length(state, param, i, pairs.len(), own.len() + around)?;
            Ok(Input { ids: [head, &own[..], tail].concat(), embed: Embed::new(Pooling::Last) })
        };
        Ok(Self { inputs: pairs.iter().enumerate().map(input).collect::<ApiResult<_>>()?, pairs: None })
    }

    fn by_classifier(
        state: &ModelState,
        texts: [(&str, &[String]); 2],
        pairs: &[(usize, usize)],
        cut: Cut,
    ) -> ApiResult<Self> {
        let encode = |(param, texts): (&str, &[String]), cut: Cut| {
            texts.iter().map(|text| cut.encode_part(state, param, text)).collect::<ApiResult<Vec<_>>>()
        };
        let (first, second) = (encode(texts[0], cut.of_others())?, encode(texts[1], cut)?);
        let tokenizer = &state.served.tokenizer;
        let around = tokenizer.pair(&[], &[]).ok_or_else(|| {
            ApiError::unsupported("model", "this model's tokenizer does not say how two texts become one sequence")
        })?;
        let lens = |(a, b): &(usize, usize)| cut.pair((first[*a].len(), second[*b].len()), around.ids.len());
        // A pair repeats its texts: the bytes of all pairs are known, and charged, before the first pair is made.
        let mut bytes = 0;
        for (i, pair) in pairs.iter().enumerate() {
            let (a, b) = lens(pair)?;
            check_length(state, texts[1].0, i, pairs.len(), a + b)?;
            bytes += (size_of::<u32>() * (a + b + around.ids.len())) as u64;
        }
        let _held = hold_answer(state, texts[1].0, bytes)?;
        let input = |pair: &(usize, usize)| {
            let (a, b) = lens(pair)?;
            let joined = tokenizer.pair(&first[pair.0][..a], &second[pair.1][..b]);
            let joined = joined.ok_or_else(|| ApiError::internal("a tokenizer joins some pairs and not others"))?;
            Ok(Input { ids: joined.ids, embed: Embed::pair(joined.second_at.map(|at| at as u32)) })
        };
        Ok(Self { inputs: pairs.iter().map(input).collect::<ApiResult<_>>()?, pairs: None })
    }

    /// Returns the bytes of the engine's results.
    pub fn result_bytes(&self, state: &ModelState) -> u64 {
        let size = if self.pairs.is_some() || state.served.pooled.rank.is_some() {
            state.served.engine.limits().embedding_size
        } else {
            1
        };
        self.inputs.len() as u64 * (u64::from(size) * size_of::<f32>() as u64 + size_of::<Vec<f32>>() as u64)
    }

    /// Returns the score of each pair, in order.
    pub async fn scores(
        &self,
        state: &Arc<ModelState>,
        id: &str,
        api: &'static str,
        param: &'static str,
    ) -> ApiResult<Vec<f64>> {
        let results = run(state, id, api, param, &self.inputs).await?;
        Ok(match &self.pairs {
            Some(pairs) => pairs.iter().map(|(a, b)| vector::cosine(&results[*a], &results[*b])).collect(),
            None => {
                let Pooled { rank, sigmoid, .. } = &state.served.pooled;
                let raw = results.iter().map(|result| match rank {
                    Some(rank) => rank.score(result),
                    None => f64::from(result[0]),
                });
                raw.map(|x| if *sigmoid { vector::sigmoid(x) } else { x }).collect()
            }
        })
    }
}

// A model as the page describes it.

const TASKS = {
  translation: "Translation", summarization: "Summarization", language_modeling: "Language model",
  embedding: "Embeddings", classification: "Classification", reranking: "Reranking",
};

/** The fields of a model that the page reads, with a description. */
export function described({ name, task, parameters, encoder_layers, decoder_layers, heads, example, ...others }) {
  const layers = [encoder_layers, decoder_layers].filter(Boolean).join(" + ");
  return {
    ...others, name, task, heads, example: example ?? "", title: name,
    generates: Boolean(decoder_layers),
    numLayers: decoder_layers || encoder_layers,
    encoderLayers: encoder_layers,
    isEncoderDecoder: Boolean(encoder_layers && decoder_layers),
    description: `${TASKS[task] ?? task}, ${size(parameters)} parameters, ${layers} layers, ${heads} heads`,
  };
}

function size(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} billion`;
  if (count >= 1e6) return `${(count / 1e6).toFixed(1)} million`;
  return count.toLocaleString("en");
}

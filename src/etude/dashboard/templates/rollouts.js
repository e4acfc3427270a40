"use strict";
// The rollout browser. Rollouts are untrusted text: they become text nodes only.

const PAGE = 60; // list entries added at a time

function pairs(entries) {
  const shown = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return node("dl", { class: "pairs" }, ...shown.map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, String(value)))));
}

function fixed(value, digits) {
  return typeof value === "number" ? value.toFixed(digits) : null;
}

function words(text) {
  return String(text).replaceAll("_", " ");
}

function verdictOf(rollout) {
  return rollout.passed === true ? "passed" : rollout.passed === false ? "failed" : "no verdict";
}

function mark(rollout) {
  const [sign, style] = { passed: ["✓", "yes"], failed: ["✗", "no"], "no verdict": ["–", "none"] }[verdictOf(rollout)];
  return node("span", { class: `mark ${style}`, title: verdictOf(rollout) }, sign);
}

function callBlock(call) {
  const block = node("div", { class: "call" }, node("code", {}, call.name || "(no name)"));
  for (const [name, value] of Object.entries(call.arguments || {})) {
    const text = String(value);
    if (text.includes("\n") || text.length > 70) block.append(node("div", { class: "muted" }, name), node("pre", {}, text));
    else block.append(" ", node("span", { class: "muted" }, `${name}=`), node("span", {}, text));
  }
  if (call.error) block.append(node("div", { class: "error" }, `malformed: ${call.error}`));
  return block;
}

function messageBlock(message, who, style) {
  const block = node("div", { class: `turn ${style}` }, node("div", { class: "who" }, who));
  if (message.thinking) block.append(node("p", { class: "thinking" }, message.thinking));
  if (message.content) block.append(style === "result" ? node("pre", {}, message.content) : node("p", {}, message.content));
  block.append(...(message.calls || []).map(callBlock));
  if (!message.thinking && !message.content && !(message.calls || []).length) block.append(node("p", { class: "muted" }, "(empty)"));
  return block;
}

function turnBlocks(rollout) {
  const blocks = [];
  let segment = 0;
  (rollout.turns || []).forEach((turn, i) => {
    if (turn.segment > segment) {
      segment = turn.segment;
      blocks.push(node("h4", {}, `Context ${segment + 1}, opened by a summary`));
    }
    const who = turn.is_summary ? `turn ${i + 1}: summary` : `turn ${i + 1}: model`;
    blocks.push(messageBlock(turn.message || {}, who, turn.is_summary ? "summary" : "model"));
    blocks.push(...(turn.results || []).map((result) => messageBlock(result, result.role || "tool", "result")));
  });
  return blocks;
}

function detail(row) {
  const rollout = row.rollout, effort = rollout.effort || {}, terms = (rollout.reward || {}).terms || {};
  const verdict = verdictOf(rollout), style = { passed: "yes", failed: "no" }[verdict] || "";
  const badges = [[verdict, style], [words(rollout.outcome || "no outcome"), ""], [words(rollout.category || ""), ""], [`${row.phase}, step ${row.step}`, ""]];
  const counts = {};
  for (const event of rollout.events || []) counts[event] = (counts[event] || 0) + 1;
  for (const [event, count] of Object.entries(counts)) badges.push([`${words(event)} × ${count}`, ""]);
  const blocks = [
    node("h3", {}, rollout.task_id || rollout.id || "rollout"),
    node("div", { class: "muted" }, rollout.id || ""),
    node("div", { class: "badges" }, ...badges.filter(([text]) => text).map(([text, kind]) => node("span", { class: `badge ${kind}` }, text))),
  ];
  if (rollout.detail) blocks.push(node("p", {}, rollout.detail));
  const instruction = row.instruction || rollout.instruction;
  if (instruction) blocks.push(node("h4", {}, "Task"), node("div", { class: "turn" }, node("p", {}, instruction)));
  blocks.push(node("h4", {}, "Reward"));
  blocks.push(Object.keys(terms).length ? pairs([["total", fixed(rollout.total_reward, 3)], ...Object.entries(terms).map(([name, value]) => [words(name), fixed(value, 3)])]) : node("p", { class: "muted" }, "no reward"));
  blocks.push(node("h4", {}, "Effort"), pairs([
    ["turns", effort.turns], ["calls", effort.calls], ["sampled tokens", rollout.sampled_tokens], ["thinking", effort.thinking_tokens],
    ["in calls", effort.call_tokens], ["tool results", effort.output_tokens], ["final message", effort.message_tokens], ["contexts", rollout.num_segments],
    ...Object.entries(rollout.seconds || {}).map(([name, value]) => [`${name} s`, fixed(value, 2)]),
  ]));
  blocks.push(node("h4", {}, "Conversation"), ...turnBlocks(rollout));
  blocks.push(node("h4", {}, "Verifier"), rollout.verifier_output ? node("pre", {}, rollout.verifier_output) : node("p", { class: "muted" }, "no output"));
  return blocks;
}

(function browse() {
  const list = document.getElementById("list"), form = document.getElementById("filters");
  if (!list) return;
  const panel = document.getElementById("detail"), rows = JSON.parse(document.getElementById("rollouts-data").textContent);
  const FIELDS = { phase: (row) => row.phase, category: (row) => row.rollout.category, outcome: (row) => row.rollout.outcome, verdict: (row) => verdictOf(row.rollout) };
  const texts = new Map(); // row -> lower-case text, filled on the first search
  const textOf = (row) => texts.get(row) || texts.set(row, JSON.stringify(row).toLowerCase()).get(row);
  let matches = rows, shown = 0, chosen = null;

  for (const [name, read] of Object.entries(FIELDS)) {
    const values = [...new Set(rows.map(read).filter(Boolean).map(String))].sort();
    form.elements[name].append(node("option", { value: "" }, "all"), ...values.map((value) => node("option", { value }, words(value))));
  }

  function entry(row) {
    const rollout = row.rollout;
    const button = node("button", { type: "button" }, mark(rollout), node("span", {}, words(rollout.category || rollout.task_id || "")),
      node("span", { class: "num" }, fixed(rollout.total_reward, 2) ?? ""), node("small", {}, `${row.phase} ${row.step} · ${(rollout.effort || {}).turns ?? "?"} turns · ${rollout.task_id || ""}`));
    button.setAttribute("aria-current", String(row === chosen));
    button.addEventListener("click", () => { open(row, button); if (window.innerWidth <= 760) panel.scrollIntoView(); });
    return node("li", {}, button);
  }

  function open(row, button) {
    chosen = row;
    for (const other of list.querySelectorAll('[aria-current="true"]')) other.setAttribute("aria-current", "false");
    if (button) button.setAttribute("aria-current", "true");
    panel.replaceChildren(...detail(row));
  }

  function more() {
    const last = list.querySelector(".more");
    if (last) last.parentElement.remove();
    list.append(...matches.slice(shown, shown + PAGE).map(entry));
    shown = Math.min(shown + PAGE, matches.length);
    if (shown < matches.length) {
      const button = node("button", { type: "button", class: "more" }, `${matches.length - shown} more`);
      button.addEventListener("click", more);
      list.append(node("li", {}, button));
    }
  }

  function apply() {
    const text = form.elements.text.value.trim().toLowerCase();
    const needle = JSON.stringify(text).slice(1, -1);
    const wanted = Object.entries(FIELDS).map(([name, read]) => [read, form.elements[name].value]).filter(([, value]) => value);
    matches = rows.filter((row) => wanted.every(([read, value]) => String(read(row)) === value) && (!text || textOf(row).includes(needle)));
    shown = 0;
    list.replaceChildren();
    if (!matches.includes(chosen)) chosen = matches[0] || null;
    more();
    document.getElementById("count").textContent = `${matches.length} shown`;
    if (chosen) open(chosen, list.querySelector('[aria-current="true"]'));
    else panel.replaceChildren(node("p", { class: "muted" }, "No rollout matches."));
  }

  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move) return;
    const buttons = [...list.querySelectorAll("button")], next = buttons[buttons.indexOf(document.activeElement) + move];
    if (next) { next.focus(); event.preventDefault(); if (!next.classList.contains("more")) next.click(); }
  });
  apply();
})();

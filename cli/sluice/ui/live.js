// Asks for this page again and again, and replaces the sections that differ.
"use strict";
const PERIOD_MS = 2000;
const told = new Date();

async function look() {
  if (document.hidden) return;
  const gone = document.getElementById("gone");
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.status !== 200 && answer.status !== 404) throw new Error(`it answers ${answer.status}`);
    replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
    told.setTime(Date.now());
    gone.hidden = true;
  } catch (error) {
    gone.textContent = `sluice ui does not answer (${error.message}). This page is of ${told.toLocaleTimeString()}.`;
    gone.hidden = false;
  }
}

function replace(page) {
  const main = document.querySelector("main");
  const ours = [...main.children], theirs = [...page.querySelector("main").children];
  const ids = (sections) => sections.map((section) => section.id).join();
  if (ids(ours) !== ids(theirs)) return main.replaceChildren(...theirs);
  ours.forEach((section, at) => {
    if (section.outerHTML === theirs[at].outerHTML || isRead(section)) return;
    const focus = section.contains(document.activeElement) && document.activeElement.getAttribute("href");
    section.replaceWith(theirs[at]);
    if (focus) theirs[at].querySelector(`[href="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
  });
}

// Somebody who marks text, to copy it, keeps it.
function isRead(section) {
  const marked = getSelection();
  return !marked.isCollapsed && section.contains(marked.anchorNode);
}

async function again() {
  await look();
  setTimeout(again, PERIOD_MS);
}
setTimeout(again, PERIOD_MS);
document.addEventListener("visibilitychange", look);
